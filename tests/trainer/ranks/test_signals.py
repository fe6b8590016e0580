"""Signals after which nothing can be saved: no process handles two of them, and the others say that it is broken."""

import pytest

from datapipe.errors import SettingError
from trainer.ranks.stop import signal_of


@pytest.mark.parametrize("name", ["KILL", "STOP", "SEGV", "BUS", "FPE", "ILL", "ABRT"])
def test_a_run_is_not_to_be_stopped_by_them(name):
    with pytest.raises(SettingError, match=f"--stop-signals {name}: no process can save a checkpoint after it"):
        signal_of(name)
