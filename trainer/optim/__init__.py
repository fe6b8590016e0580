"""The optimizers, by name. A new one is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..recipe import Optimizer

REGISTRY = {
    "sgd": "sgd:build",
}
PRECONDITIONERS = ("none", "kfac", "ekfac")


def build(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the recipe's section asks for, over `model`'s parameters.

    Its learning rate is set anew at every step. Raises KeyError for a name that is not in REGISTRY.
    """
    module, function = REGISTRY[settings.name].split(":")
    return getattr(import_module(f".{module}", __name__), function)(settings, model)
