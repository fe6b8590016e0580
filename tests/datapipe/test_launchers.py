"""Variables of launchers that are set but empty, as in `RANK= trainer train`."""

import pytest

from datapipe.cluster import placement
from datapipe.cluster.launchers import LAUNCHERS


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_an_empty_variable_counts_as_unset(launcher):
    alone = placement({})
    for names in ({launcher.index}, {launcher.count}, {launcher.index, launcher.count}):
        assert placement(dict.fromkeys((*names, *launcher.beside), "")) == alone, names
