"""K-FAC and its kin as a recipe asks for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config.recipe import Kfac
from ..kfac import EKFAC, KFAC, AdaptiveDamping, reduce_to_owners

KINDS = {"kfac": KFAC, "ekfac": EKFAC}


def build(name: str, settings: Kfac, model: nn.Module, scaler: torch.amp.GradScaler, world_size: int) -> KFAC:
    """For `model`, in DistributedDataParallel where there are several ranks; its gradients are then reduced to the
    layers' owners where one rank preconditions each. Raises ValueError.
    """
    preconditioner = KINDS[name](
        model,
        skip=settings.skip,
        grad_scaler=scaler,
        factor_decay=settings.factor_decay,
        kl_clip=settings.kl_clip,
        solver=settings.solver,
        stagger=settings.stagger,
        factor_fraction=settings.factor_fraction,
        spatially_uncorrelated=settings.spatially_uncorrelated,
        inv_dtype=settings.inv_dtype,
        local_factors=settings.local_factors,
        grad_worker_fraction=settings.grad_worker_fraction or 1 / world_size,
        **_scheduled(settings, 0.0),
    )
    at_owners = settings.grad_worker_fraction == 0 and not preconditioner.scales_gradients()
    if at_owners and isinstance(model, DistributedDataParallel):
        reduce_to_owners(model, preconditioner)
    return preconditioner


def adaptive_damping(settings: Kfac, preconditioner: KFAC | None) -> AdaptiveDamping | None:
    """If the recipe asks for it."""
    if preconditioner is None or settings.damping_update_steps is None:
        return None
    return AdaptiveDamping(preconditioner, settings.damping_update_steps)


def set_for_step(preconditioner: KFAC, settings: Kfac, epoch: float, lr: float) -> None:
    """What the next step uses. `epoch`: how far the run is, with fractions."""
    for name, value in _scheduled(settings, epoch).items():
        if name != "damping" or settings.damping_update_steps is None:
            setattr(preconditioner, name, value)
    preconditioner.lr = lr


def _scheduled(settings: Kfac, epoch: float) -> dict[str, float]:
    names = ("damping", "factor_update_steps", "inv_update_steps")
    return {name: next(value for start, value in reversed(getattr(settings, name)) if start <= epoch) for name in names}
