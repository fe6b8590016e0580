"""The optimizers, by name. A new one is one file and one line here."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Union

import torch
from pydantic import Discriminator, Tag
from torch import nn

from . import lamb, lars, muon, sgd, soap

__all__ = ["REGISTRY", "Optimizer", "build", "set_lr"]

# Each has Settings, its section of a recipe, and build(settings, model).
REGISTRY: dict[str, ModuleType] = {"sgd": sgd, "lars": lars, "lamb": lamb, "muon": muon, "soap": soap}


def _name(section: object) -> object:
    return section.get("name", "sgd") if isinstance(section, dict) else getattr(section, "name", "sgd")


Optimizer = Annotated[
    Union[tuple(Annotated[of.Settings, Tag(name)] for name, of in REGISTRY.items())],  # noqa: UP007 - made at run time
    Discriminator(_name),
]


def build(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the recipe's section asks for, over `model`'s parameters."""
    return REGISTRY[settings.name].build(settings, model)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next step. A group may have its own multiple of it, as "lr_factor"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
