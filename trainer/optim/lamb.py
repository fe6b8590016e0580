"""LAMB: Adam whose step is as large as a layer's weights allow (You et al. 2020, arXiv:1904.00962)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..fields import BelowOne, Positive
from .groups import parameter_groups
from .settings import OptimizerSettings


class Settings(OptimizerSettings):
    name: Literal["lamb"]
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: Positive = 1e-6


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The weights' decay is part of the step that is scaled, as in the paper's algorithm 2. The averages' bias is not
    corrected: the scaling takes it out, and that library's correction, after it, makes the first step 10 times longer.
    """
    from pytorch_optimizer import Lamb

    return Lamb(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decouple=False,
        pre_norm=False,
        adam_debias=True,  # in that library: no correction
    )
