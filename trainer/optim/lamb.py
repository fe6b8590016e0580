"""LAMB: Adam whose step is as large as a layer's weights allow (You et al. 2020, arXiv:1904.00962)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from .settings import BelowOne, OptimizerSettings, Positive


class Settings(OptimizerSettings):
    """Adam in which each layer's step is scaled to the norm of its weights."""

    ignores_length: ClassVar[bool] = True
    name: Literal["lamb"]
    """Kind of optimizer."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay per step of the averages of the gradient and of its square."""
    eps: Positive = 1e-6
    """Number that is added to the denominator of Adam's step."""


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build LAMB as in the paper's algorithm 2: weight decay is part of the step that is scaled.

    The bias of the averages is not corrected. The scaling takes it out; the library would correct it after the
    scaling, which makes the first step 10 times longer.
    """
    from pytorch_optimizer import Lamb

    return Lamb(
        settings.parameter_groups(model),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decouple=False,
        pre_norm=False,
        adam_debias=True,  # which means no correction in that library
    )
