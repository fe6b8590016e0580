"""LARS: SGD whose step is as large as a layer's weights allow (You, Gitman, Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from .settings import MomentumSettings, Positive


class Settings(MomentumSettings):
    """SGD in which each matrix's gradient is scaled by trust_coefficient * |w| / (|g| + weight_decay * |w|).

    The gradients of vectors are not scaled.
    """

    ignores_length: ClassVar[bool] = True
    name: Literal["lars"]
    """Kind of optimizer."""
    trust_coefficient: Positive = 0.001
    """Length of a layer's step at a learning rate of 1, as a fraction of the norm of its weights (η in the paper)."""


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build LARS over two groups of `model`'s parameters: matrices, which decay, and vectors, which do not."""
    from pytorch_optimizer import LARS

    return LARS(
        settings.parameter_groups(model, settings.vector_lr_factor),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        trust_coefficient=settings.trust_coefficient,
    )
