"""The section of a recipe for K-FAC, and K-FAC's own settings."""

from __future__ import annotations

import pytest

from trainer.kfac.settings import DESCRIPTIONS, KFACSettings
from trainer.optim.kfac import FROM_THE_RUN, SCHEDULED, Settings

NAMES = KFACSettings.__dataclass_fields__.keys()


def test_the_section_has_the_settings_with_their_defaults():
    section = Settings()
    assert Settings.model_fields.keys() == (NAMES - {*FROM_THE_RUN}) | {"damping_update_steps"}
    for name in NAMES - {*FROM_THE_RUN}:
        assert Settings.model_fields[name].description.startswith(DESCRIPTIONS[name])
    for name in NAMES - {*FROM_THE_RUN, *SCHEDULED}:
        assert getattr(section, name) == getattr(KFACSettings, name), name
    assert section.at_epoch(0.0) == {name: getattr(KFACSettings, name) for name in SCHEDULED}


@pytest.mark.parametrize("value", [0, -1, 0.5, 1, 3, 1.5, True, None, "eigen", "cholesky", "bfloat16", "qr"], ids=repr)
@pytest.mark.parametrize("name", sorted(NAMES - {*FROM_THE_RUN, *SCHEDULED, "skip"}))
def test_the_section_allows_what_the_settings_allow(name, value):
    """Except fractions of 0: one rank for each layer, whatever the number of ranks."""
    allowed = []
    for make in (KFACSettings, Settings):
        try:
            make(**{name: value})
            allowed.append(True)
        except ValueError:
            allowed.append(False)
    assert allowed[0] == allowed[1] or (name, value) == ("grad_worker_fraction", 0)
