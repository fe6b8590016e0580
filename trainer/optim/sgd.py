"""SGD with momentum, Nesterov's or the classical one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from .groups import parameter_groups
from .settings import MomentumSettings


class Settings(MomentumSettings):
    """Stochastic gradient descent: v = momentum * v + g; w = w - lr * v."""

    name: Literal["sgd"] = "sgd"
    """Kind of optimizer."""


def build(settings: Settings, model: nn.Module) -> torch.optim.SGD:
    """Build torch's SGD, in which a change of the learning rate acts at once on the whole step.

    It is the fused one, a single pass over the memory of all parameters. On a CPU that takes for granted that
    gradients lie in memory as their parameters do; autograd, DDP and K-FAC see to it.
    """
    return torch.optim.SGD(
        parameter_groups(model, settings.weight_decay, settings.vector_lr_factor),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=True,
    )
