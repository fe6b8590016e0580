"""The optimizers, by name. A new one is one file and one line here."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Union

import torch
from pydantic import Discriminator, Tag
from torch import nn

from . import lamb, lars, muon, sgd, soap
from .settings import OptimizerSettings

__all__ = ["REGISTRY", "Optimizer", "build", "set_lr"]

# Each has Settings, its section of a recipe, and build(settings, model).
REGISTRY: dict[str, ModuleType] = {"sgd": sgd, "lars": lars, "lamb": lamb, "muon": muon, "soap": soap}


def _name(section: object) -> object:
    return section.get("name", "sgd") if isinstance(section, dict) else getattr(section, "name", "sgd")


if TYPE_CHECKING:
    Optimizer = OptimizerSettings
else:  # the class that the section's `name` selects
    Optimizer = Annotated[
        Union[tuple(Annotated[module.Settings, Tag(name)] for name, module in REGISTRY.items())],  # noqa: UP007
        Discriminator(_name),
    ]


def build(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe's section asks for, over `model`'s parameters."""
    return REGISTRY[settings.name].build(settings, model)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step. A group may use its own multiple of it, as "lr_factor"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
