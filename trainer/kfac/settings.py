"""The settings of K-FAC: for each its type, default, range and description, which stand nowhere else.

The signature and the help of `KFAC`, its attributes, the cost formulas and a recipe's section take them from here. The
section states the ranges in pydantic's terms, and a test compares the two.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

from .registration import Skip

SolverName = Literal["eigen", "cholesky"]
InverseDtype = Literal["bfloat16"]
Auto = Literal["auto"]
# The gradient's noise falls with the number of samples in a step, and so grows the step that it allows: measured on
# Fashion-MNIST with ResNet-8 and ResNet-20, in steps of 512 and 4,096 images.
KL_CLIP_PER_SAMPLE = 3e-7
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Allowed(NamedTuple):
    """What a setting may be: a value of type `kind` that `fits`, in words `text`; or None, if that is `optional`."""

    kind: type | tuple[type, ...]
    fits: Callable[[Any], bool]
    text: str
    optional: bool = False


_COUNT = Allowed(Integral, lambda value: value >= 1, "whole numbers from 1")
_POSITIVE = Allowed(Real, lambda value: 0 < value < math.inf, "above 0")
_CLIP = Allowed(
    (Real, str),
    lambda value: value == "auto" if isinstance(value, str) else 0 < value < math.inf,
    'above 0, "auto", or None',
    optional=True,
)
_FROM_ZERO = Allowed(Real, lambda value: 0 <= value < math.inf, "from 0")
_BELOW_ONE = Allowed(Real, lambda value: 0 <= value < 1, "from 0 to below 1")
_FRACTION = Allowed(Real, lambda value: 0 < value <= 1, "above 0 to 1")
_BOOLEAN = Allowed(bool, lambda value: True, "True or False")
_SOLVER = Allowed(str, lambda value: value in get_args(SolverName), ", ".join(get_args(SolverName)))
_INVERSE_DTYPE = Allowed(str, lambda value: value in get_args(InverseDtype), "bfloat16, or None", optional=True)


@dataclass(frozen=True, kw_only=True)
class KFACSettings:
    """What `KFAC` takes besides the model.

    Args:
        damping: Damping λ, which is added to the curvature; above 0.
        factor_update_steps: A layer's factors are averaged once in so many steps. In the first ones, while a network
            changes fast, once in step 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on. A changed value takes effect one step
            late: the layers of the next step are already chosen.
        inv_update_steps: A layer's solution, the inverse or eigendecomposition of its factors, is computed once in so
            many steps; at first more often, as factors are.
        factor_decay: The weight of what was before in the factors' running averages; from 0 to below 1.
        kl_clip: Bounds the length of the optimizer's step, as if it were `lr` times the gradient, in the metric of the
            Fisher matrix: gradients are scaled by min(1, √(kl_clip / (lr² |Σ ⟨D', D⟩|))). "auto": 3e-7 times the
            samples of a step, over all ranks and micro-batches. None for no bound.
        lr: The optimizer's learning rate, for `kl_clip`. Set it to that of each step if it changes.
        accumulation_steps: Micro-batches in a step. The loss of each was divided by this number, and its backward pass
            comes before the next one's forward pass. Otherwise factors are wrong.
        factor_fraction: The share of a batch's samples that enters the factors, for less work; above 0 to 1. For a
            batch norm's factors these samples are the batch.
        solver: "eigen" puts the damping on the product of the factors, exactly; "cholesky" puts it on each factor, at
            a lower cost.
        stagger: Layers take turns in updating their factors and solutions, so that all steps take about equally long.
            Without, all layers do it in the same step.
        spatially_uncorrelated: Assume that neighbouring pixels are uncorrelated (SUA, Laurent et al. 2018), so that one
            factor serves all elements of a kernel. Applies to convolutions without groups and bias, and saves most
            work and memory in wide layers.
        inv_dtype: "bfloat16" keeps solutions in half the memory, which are faster to apply where the hardware
            multiplies bfloat16; with low damping only for solver "eigen". None: the type of the factors.
        grad_worker_fraction: The share of the ranks that preconditions each layer, from 1 (all of them: nothing except
            factors and solutions is sent) to 1 / world size (one rank for each layer: least memory).
        local_factors: A layer's factors come from its owner's part of the batch, and are not sent. Layers of several
            owners then have their turns in the same steps.
        skip: Regular expressions, which are searched for in the names of modules and their classes, or classes: what
            matches keeps its gradients.
        grad_scaler: The scaler of mixed precision, if there is one; unscale the gradients before `step`.
        independent: This process trains a network of its own. Otherwise, processes that a launcher or Horovod has
            started together must be connected by torch.distributed before.

    Raises:
        ValueError: A value is out of range. The message names the setting, the value and what is allowed.
    """

    damping: float = field(default=1.5e-4, metadata={"allowed": _POSITIVE})
    factor_update_steps: int = field(default=10, metadata={"allowed": _COUNT})
    inv_update_steps: int = field(default=100, metadata={"allowed": _COUNT})
    factor_decay: float = field(default=0.8, metadata={"allowed": _BELOW_ONE})
    kl_clip: float | Auto | None = field(default="auto", metadata={"allowed": _CLIP})
    lr: float = field(default=0.1, metadata={"allowed": _FROM_ZERO})
    accumulation_steps: int = field(default=1, metadata={"allowed": _COUNT})
    factor_fraction: float = field(default=1.0, metadata={"allowed": _FRACTION})
    solver: SolverName = field(default="eigen", metadata={"allowed": _SOLVER})
    stagger: bool = field(default=True, metadata={"allowed": _BOOLEAN})
    spatially_uncorrelated: bool = field(default=False, metadata={"allowed": _BOOLEAN})
    inv_dtype: InverseDtype | None = field(default=None, metadata={"allowed": _INVERSE_DTYPE})
    grad_worker_fraction: float = field(default=1.0, metadata={"allowed": _FRACTION})
    local_factors: bool = field(default=False, metadata={"allowed": _BOOLEAN})
    # Without a range: they are checked where they are used, and ranks may differ in them.
    skip: Skip = ()
    grad_scaler: torch.amp.GradScaler | None = None
    independent: bool = False

    def __post_init__(self) -> None:
        for name, value in self.with_range().items():
            allowed = self.__dataclass_fields__[name].metadata["allowed"]
            fits = isinstance(value, allowed.kind) and isinstance(value, bool) == (allowed.kind is bool)
            if not (fits and allowed.fits(value)) and not (value is None and allowed.optional):
                raise ValueError(f"{name}: {value!r} is out of range; allowed: {allowed.text}")

        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "is_enabled"):
            raise ValueError(f"grad_scaler: {self.grad_scaler!r} scales nothing; allowed: a torch.amp.GradScaler, None")

    def with_range(self) -> dict[str, Any]:
        """Return the settings that have a range, by name: all ranks must have the same."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata}

    def gradient_scale(self) -> float | Tensor:
        """Return the factor that makes a sample's gradient, of a mean over one sample, that of its own loss."""
        scaler = self.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return float(self.accumulation_steps)
        scale = scaler._scale  # on the device; get_scale() would wait for it
        return self.accumulation_steps / (scaler.get_scale() if scale is None else scale)


_ENTRIES = (inspect.getdoc(KFACSettings) or "").partition("Args:\n")[2].partition("\n\n")[0]  # "" with python -OO
DESCRIPTIONS = {
    name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", _ENTRIES, re.MULTILINE)
}


class Changeable(Generic[_T]):
    """An attribute of `KFAC`: a setting that may be changed between steps."""

    def __set_name__(self, owner: type, name: str) -> None:
        first_sentence = re.split("[.:] ", DESCRIPTIONS.get(name, ""))[0]
        self._name, self.__doc__ = name, f"{first_sentence.removesuffix('.')}."

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        return self if instance is None else getattr(instance.settings, self._name)  # type: ignore[return-value]

    def __set__(self, instance: Any, value: _T) -> None:
        instance._settings = replace(instance.settings, **{self._name: value})


def read_arguments(owner: type, settings: dict[str, Any]) -> KFACSettings:
    """Return the settings that a constructor was given. Raises TypeError, which names `owner`, and ValueError."""
    try:
        return KFACSettings(**settings)
    except TypeError as error:
        raise TypeError(str(error).replace(KFACSettings.__name__, owner.__name__)) from None


def takes_settings(
    settings: Callable[_P, KFACSettings],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, nn.Module, _P], None]]:
    """Give a constructor of a model and `**settings` the signature of KFACSettings, and its description of each."""

    def describe(init: Callable[..., None]) -> Callable[Concatenate[Any, nn.Module, _P], None]:
        own = [*inspect.signature(init).parameters.values()][:-1]
        names = inspect.signature(settings, eval_str=True).parameters.values()
        init.__signature__ = inspect.Signature([*own, *names])  # type: ignore[attr-defined]
        init.__doc__ = (inspect.getdoc(init) or "").replace("    **settings: Those of `KFACSettings`.", _ENTRIES)
        return init

    return describe
