"""K-FAC and EKFAC: their section of a recipe, and how a run builds and changes them."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..kfac import EKFAC, KFAC, AdaptiveDamping, reduce_to_owners
from ..kfac.settings import DESCRIPTIONS, Auto, InverseDtype, KFACSettings, SolverName
from .settings import BelowOne, Count, Fraction, Positive, Section, or_none

KINDS = {"kfac": KFAC, "ekfac": EKFAC}
SCHEDULED = "damping", "factor_update_steps", "inv_update_steps"
FROM_THE_RUN = "lr", "accumulation_steps", "grad_scaler", "independent"  # settings of KFAC that the section has not


def _pairs(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return ((0, value),)


def _rising_from_0(pairs: tuple[tuple[float, Any], ...]) -> tuple[tuple[float, Any], ...]:
    starts = [start for start, _ in pairs]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError("must be one value, or pairs of an epoch and a value, with epochs that rise from 0")
    return pairs


_Epoch = Annotated[float, Field(ge=0)]
_Pairs = BeforeValidator(_pairs), AfterValidator(_rising_from_0)
_Positives = Annotated[tuple[tuple[_Epoch, Positive], ...], *_Pairs]
_Counts = Annotated[tuple[tuple[_Epoch, Count], ...], *_Pairs]


def _of_kfac(name: str, more: str = "") -> Any:
    """Return the field of a setting, with the default and the description that `KFAC` has for it."""
    default = getattr(KFACSettings, name)
    default = ((0, default),) if name in SCHEDULED else default
    return Field(default=default, description=DESCRIPTIONS.get(name, name) + more)


class Settings(Section):
    """For the preconditioners "kfac" and "ekfac": the settings of `trainer.kfac.KFAC`, with its defaults.

    Damping and the two intervals may change with the epoch: [[0, 0.03], [10, 0.003]].
    """

    damping: _Positives = _of_kfac("damping")
    factor_update_steps: _Counts = _of_kfac("factor_update_steps")
    inv_update_steps: _Counts = _of_kfac("inv_update_steps")
    damping_update_steps: Annotated[Count | None, or_none()] = None
    """Steps between adaptations of the damping (Levenberg–Marquardt); "none": it does not adapt."""
    factor_decay: BelowOne = _of_kfac("factor_decay")
    kl_clip: Annotated[Positive | Auto | None, or_none()] = _of_kfac("kl_clip")
    factor_fraction: Annotated[Positive, Field(le=1)] = _of_kfac("factor_fraction")
    spatially_uncorrelated: bool = _of_kfac("spatially_uncorrelated")
    inv_dtype: Annotated[InverseDtype | None, or_none()] = _of_kfac("inv_dtype")
    solver: SolverName = _of_kfac("solver")
    stagger: bool = _of_kfac("stagger")
    grad_worker_fraction: Fraction = _of_kfac("grad_worker_fraction", " 0: one rank for each layer.")
    local_factors: bool = _of_kfac("local_factors")
    skip: tuple[str, ...] = _of_kfac("skip")

    @model_validator(mode="after")
    def _one_rule_for_damping(self) -> Settings:
        if self.damping_update_steps is not None and len(self.damping) > 1:
            raise ValueError("damping changes with the epoch, and damping_update_steps adapts it: only one of the two")
        return self

    def at_epoch(self, epoch: float) -> dict[str, Any]:
        """Return the values of the SCHEDULED settings at an epoch, which may be a fraction."""
        return {
            name: next(value for start, value in reversed(getattr(self, name)) if start <= epoch) for name in SCHEDULED
        }


def build(
    name: str,
    settings: Settings,
    model: nn.Module,
    scaler: torch.amp.GradScaler | None,
    world_size: int,
    accumulation_steps: int = 1,
) -> KFAC:
    """Return the preconditioner that a recipe asks for.

    If one rank preconditions each layer, gradients are reduced to the layers' owners.

    Args:
        name: "kfac" or "ekfac".
        settings: The recipe's section.
        model: The model, in DistributedDataParallel if there are several ranks.
        scaler: The scaler of mixed precision, if there is one.
        world_size: The number of ranks.
        accumulation_steps: Backward passes before each step.

    Raises:
        ValueError: A setting does not fit the model or the ranks.
    """
    arguments = {name: getattr(settings, name) for name in KFACSettings.__dataclass_fields__.keys() - {*FROM_THE_RUN}}
    arguments["grad_worker_fraction"] = settings.grad_worker_fraction or 1 / world_size
    arguments |= settings.at_epoch(0.0) | {"accumulation_steps": accumulation_steps, "grad_scaler": scaler}
    preconditioner = KINDS[name](model, **arguments)
    at_owners = settings.grad_worker_fraction == 0 and not preconditioner.scales_gradients()
    if at_owners and isinstance(model, DistributedDataParallel):
        reduce_to_owners(model, preconditioner)
    return preconditioner


def adaptive_damping(settings: Settings, preconditioner: KFAC | None) -> AdaptiveDamping | None:
    """Return the adaptive damping if the recipe asks for it."""
    if preconditioner is None or settings.damping_update_steps is None:
        return None
    return AdaptiveDamping(preconditioner, settings.damping_update_steps)


def set_for_step(preconditioner: KFAC, settings: Settings, epoch: float, lr: float) -> None:
    """Set what the next step uses.

    Args:
        preconditioner: The preconditioner that is changed.
        settings: The recipe's section.
        epoch: Progress of the run in epochs, with fractions.
        lr: The learning rate of the step.
    """
    for name, value in settings.at_epoch(epoch).items():
        if name != "damping" or settings.damping_update_steps is None:
            setattr(preconditioner, name, value)
    preconditioner.lr = lr


def preconditioner_counts(preconditioner: KFAC) -> dict[str, int]:
    """Return what has happened on this rank since it was built; the ranks' sums have each once. Waits for the device.

    Returns:
        Updates of a layer's factors and of its solution, updates that were skipped, solutions that failed.
    """
    is_first = preconditioner.communicator.rank == 0
    counted = [block for block in preconditioner.blocks.values() if (is_first if block.is_norm else block.is_owner)]
    return {
        "factor_updates": sum(block.num_updates["factors"] for block in counted),
        "solution_updates": sum(block.num_updates["solution"] for block in counted),
        "skipped": preconditioner.skipped(),
        "fallbacks": preconditioner.fallbacks(),
    }
