"""SGD with momentum, Nesterov's or the classical one."""

from __future__ import annotations

import torch
from torch import nn

from ..recipe import Optimizer
from .groups import parameter_groups


def build(settings: Optimizer, model: nn.Module) -> torch.optim.SGD:
    """torch's SGD: v = momentum * v + g; w = w - lr * v, so that lr changes act at once."""
    return torch.optim.SGD(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
    )
