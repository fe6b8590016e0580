"""The settings: where they stand, their ranges, and which may change."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import get_type_hints

import pytest
import torch

from tests.trainer.kfac.networks import EVERY_STEP, run, small
from trainer.kfac import EKFAC, KFAC
from trainer.kfac.settings import Changeable, KFACSettings


@pytest.mark.parametrize(
    "settings",
    [{"damping": 0}, {"damping": float("nan")}, {"factor_update_steps": 0}, {"inv_update_steps": 1.5},
     {"factor_decay": 1.0}, {"kl_clip": 0}, {"lr": -1}, {"solver": "qr"}, {"stagger": 1}, {"damping": True},
     {"inv_dtype": "half"}, {"inv_dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=f"^{next(iter(settings))}: .* allowed: "):
        KFAC(small(), **settings)


def test_settings_may_change_between_steps():
    model = small()
    preconditioner = KFAC(model, damping=0.01, **EVERY_STEP)
    run(model, preconditioner, 1)
    preconditioner.damping, preconditioner.lr, preconditioner.factor_update_steps = 0.1, 0.01, 5
    assert (preconditioner.damping, preconditioner.settings.factor_update_steps) == (0.1, 5)
    run(model, preconditioner, 7, first=1)
    with pytest.raises(ValueError, match="damping: -1 is out of range; allowed: above 0"):
        preconditioner.damping = -1
    for name in ("solver", "dampng"):  # one that cannot be changed, and a misspelt one
        for other in (preconditioner, EKFAC(small())):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                setattr(other, name, 0.1)


def test_settings_change_by_the_attributes_alone():
    """The settings themselves would take no notice of which may change, nor of a misspelt one."""
    preconditioner = KFAC(small())
    for name, value in {"damping": 0.1, "solver": "cholesky", "local_factors": True, "dampng": 1}.items():
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(preconditioner.settings, name, value)
    with pytest.raises(AttributeError):
        preconditioner.settings = KFACSettings(solver="cholesky")
    assert preconditioner.settings == KFACSettings()


@pytest.mark.parametrize("name", ["damping", "factor_decay", "kl_clip", "lr"])
def test_a_changed_setting_acts_as_a_given_one(name):
    value, results = OTHER_VALUES[name], []
    for given, changed in (({}, False), ({name: value}, False), ({}, True)):
        model = small()
        preconditioner = KFAC(model, **given, **EVERY_STEP)
        if changed:
            setattr(preconditioner, name, value)
        run(model, preconditioner, 3)
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[0], results[1])


SCALER = torch.amp.GradScaler("cpu")
OTHER_VALUES = {
    "damping": 0.5, "factor_update_steps": 7, "inv_update_steps": 70, "factor_decay": 0.5, "kl_clip": None, "lr": 0.3,
    "accumulation_steps": 2, "factor_fraction": 0.5, "solver": "cholesky", "stagger": False,
    "spatially_uncorrelated": True, "inv_dtype": "bfloat16", "grad_worker_fraction": 1, "local_factors": True,
    "skip": "head", "grad_scaler": SCALER, "independent": True,
}  # fmt: skip


def test_the_signature_is_that_of_the_settings():
    """Names, their order, types and defaults agree."""
    parameters, types = inspect.signature(KFAC).parameters, get_type_hints(KFACSettings)
    settings = {field.name: field for field in fields(KFACSettings)}
    assert list(parameters) == ["model", *settings]
    for name, field in settings.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameters[name].default, parameters[name].annotation) == (field.default, types[name]), name
    assert inspect.signature(EKFAC) == inspect.signature(KFAC)


def test_each_setting_reaches_the_settings():
    assert vars(KFAC(small(), **OTHER_VALUES).settings) == OTHER_VALUES
    assert KFAC(small()).settings == KFACSettings()
    changed = [name for name, value in OTHER_VALUES.items() if value != getattr(KFACSettings, name)]
    assert changed == [name for name in OTHER_VALUES if name != "grad_worker_fraction"]  # one rank has no other


def test_each_setting_is_described():
    arguments = inspect.getdoc(KFAC.__init__).partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): ", arguments, re.MULTILINE)
    assert described == list(inspect.signature(KFAC).parameters)
    assert KFAC.__dict__["damping"].__doc__ == "Damping λ, which is added to the curvature; above 0."


def test_the_properties_are_those_that_may_be_changed():
    preconditioner = KFAC(small())
    properties = [name for name, value in vars(KFAC).items() if isinstance(value, Changeable)]
    assert properties == [field.name for field in fields(KFACSettings)][:6]  # as the documentation says
    for name in properties:
        setattr(preconditioner, name, OTHER_VALUES[name])
        assert getattr(preconditioner, name) == getattr(preconditioner.settings, name) == OTHER_VALUES[name]
