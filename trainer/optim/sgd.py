"""SGD with momentum, Nesterov's or the classical one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from .groups import parameter_groups
from .settings import MomentumSettings


class Settings(MomentumSettings):
    name: Literal["sgd"] = "sgd"


def build(settings: Settings, model: nn.Module) -> torch.optim.SGD:
    """torch's SGD: v = momentum * v + g; w = w - lr * v, so that lr changes act at once."""
    return torch.optim.SGD(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
    )
