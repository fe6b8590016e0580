"""Muon: the momentum of a layer, made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .settings import BelowOne, OptimizerSettings, Positive


class Settings(OptimizerSettings):
    """Orthogonal steps for the hidden layers' weights, at the rate `lr`; AdamW for all other parameters.

    The others are vectors, embeddings, and the weight of the last layer in the order of the model's modules.
    """

    ignores_length: ClassVar[bool] = True
    name: Literal["muon"]
    """Kind of optimizer."""
    momentum: BelowOne = 0.95
    """Decay of the hidden layers' momentum per step."""
    nesterov: bool = True
    """Use Nesterov's momentum in hidden layers."""
    adam_lr: Positive = 3e-4
    """AdamW's peak learning rate; it follows the same schedule as `lr`."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay per step of AdamW's averages of the gradient and of its square."""


def build(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build Muon over three groups of parameters: hidden weights, other matrices, and vectors, which do not decay.

    A convolution's filter is a row of its matrix.
    """
    from pytorch_optimizer import Muon

    others = _matrices_that_are_not_hidden(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = [p for p in parameters if p.ndim > 1 and id(p) not in others]
    matrices = [p for p in parameters if p.ndim > 1 and id(p) in others]
    vectors = [p for p in parameters if p.ndim <= 1]
    # `set_lr` keeps the ratio of AdamW's rate to the hidden layers' rate.
    ratio = settings.adam_lr / settings.lr
    adam = {"use_muon": False, "betas": settings.betas, "lr": settings.adam_lr, "lr_factor": ratio}
    groups = [
        {"params": hidden, "use_muon": True, "weight_decay": settings.weight_decay},
        {"params": matrices, "weight_decay": settings.weight_decay, **adam},
        {"params": vectors, "weight_decay": 0.0, **adam},
    ]
    return Muon(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
    )


def _matrices_that_are_not_hidden(model: nn.Module) -> set[int]:
    """Return the ids of embeddings and of the last other layer's weight."""
    weights = [(module, getattr(module, "weight", None)) for module in model.modules()]
    matrices = [(module, weight) for module, weight in weights if isinstance(weight, Tensor) and weight.ndim > 1]
    embeddings = [weight for module, weight in matrices if isinstance(module, nn.Embedding)]
    others = [weight for module, weight in matrices if not isinstance(module, nn.Embedding)]
    return {id(weight) for weight in embeddings + others[-1:]}
