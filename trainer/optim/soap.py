"""SOAP: Adam in the eigenvectors of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..fields import BelowOne, Count
from .groups import parameter_groups
from .settings import OptimizerSettings


class Settings(OptimizerSettings):
    """`inv_update_steps`: how often the eigenvectors follow the factors. A dimension above `max_dim` has none."""

    name: Literal["soap"]
    betas: tuple[BelowOne, BelowOne] = (0.95, 0.95)
    inv_update_steps: Count = 10
    max_dim: Count = 10_000


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The first step only begins the averages; vectors have plain Adam."""
    from pytorch_optimizer import SOAP

    return SOAP(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        precondition_frequency=settings.inv_update_steps,
        max_precondition_dim=settings.max_dim,
    )
