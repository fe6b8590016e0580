"""Muon: the momentum of a layer, made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..fields import BelowOne, Positive
from .settings import OptimizerSettings


class Settings(OptimizerSettings):
    """`lr` is that of the hidden layers' weights; vectors, embeddings and the last layer with a matrix, in the order in
    which the model has its layers, have AdamW with `adam_lr`, on the same schedule.
    """

    name: Literal["muon"]
    momentum: BelowOne = 0.95
    nesterov: bool = True
    adam_lr: Positive = 3e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """A filter is a row of its matrix. Vectors do not decay."""
    from pytorch_optimizer import Muon

    weights = [(module, getattr(module, "weight", None)) for module in model.modules()]
    layers = [(module, weight) for module, weight in weights if isinstance(weight, torch.Tensor) and weight.ndim > 1]
    embeddings = [weight for module, weight in layers if isinstance(module, nn.Embedding)]
    last = [weight for module, weight in layers if not isinstance(module, nn.Embedding)][-1:]
    not_hidden = {id(weight) for weight in embeddings + last}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    lr = {"lr": settings.adam_lr, "lr_factor": settings.adam_lr / settings.lr}
    adam = {"use_muon": False, "betas": settings.betas, **lr}
    decay = settings.weight_decay
    groups = [
        {"params": [p for p in matrices if id(p) not in not_hidden], "use_muon": True, "weight_decay": decay},
        {"params": [p for p in matrices if id(p) in not_hidden], "weight_decay": decay, **adam},
        {"params": vectors, "weight_decay": 0.0, **adam},
    ]
    return Muon(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
    )
