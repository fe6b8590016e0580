"""SOAP: Adam in the eigenvectors of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from .settings import BelowOne, Count, OptimizerSettings


class Settings(OptimizerSettings):
    """Adam for matrices in the eigenvectors of Shampoo's factors; plain Adam for vectors."""

    ignores_length: ClassVar[bool] = True
    name: Literal["soap"]
    """Kind of optimizer."""
    betas: tuple[BelowOne, BelowOne] = (0.95, 0.95)
    """Decay per step of the averages of the gradient and of its square."""
    inv_update_steps: Count = 10
    """Steps between updates of the eigenvectors from the factors."""
    max_dim: Count = 10_000
    """Largest dimension of a matrix, in rows or columns, that has eigenvectors; a larger one has none."""


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build SOAP, whose first step moves no matrix: it only begins the averages."""
    from pytorch_optimizer import SOAP

    return SOAP(
        settings.parameter_groups(model),
        lr=settings.lr,
        betas=settings.betas,
        precondition_frequency=settings.inv_update_steps,
        max_precondition_dim=settings.max_dim,
    )
