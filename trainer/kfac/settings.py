"""The settings of K-FAC: their types, defaults and ranges. `KFAC` documents what they mean.

Its signature, the cost formulas and a recipe's section take types and defaults from here. The section states the
ranges in pydantic's terms, and a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

SolverName = Literal["eigen", "cholesky"]
InverseDtype = Literal["bfloat16"]
Auto = Literal["auto"]
# The gradient's noise falls with the number of samples in a step, and so grows the step that it allows: measured on
# Fashion-MNIST with ResNet-8 and ResNet-20, in steps of 512 and 4,096 images.
KL_CLIP_PER_SAMPLE = 3e-7


class Allowed(NamedTuple):
    """What a setting may be: a value of type `kind` that `fits`, in words `text`; or None, if that is `optional`."""

    kind: type | tuple[type, ...]
    fits: Callable[[Any], bool]
    text: str
    optional: bool = False


COUNT = Allowed(Integral, lambda value: value >= 1, "whole numbers from 1")
POSITIVE = Allowed(Real, lambda value: 0 < value < math.inf, "above 0")
CLIP = Allowed(
    (Real, str),
    lambda value: value == "auto" if isinstance(value, str) else 0 < value < math.inf,
    'above 0, "auto", or None',
    optional=True,
)
FROM_ZERO = Allowed(Real, lambda value: 0 <= value < math.inf, "from 0")
BELOW_ONE = Allowed(Real, lambda value: 0 <= value < 1, "from 0 to below 1")
FRACTION = Allowed(Real, lambda value: 0 < value <= 1, "above 0 to 1")
BOOLEAN = Allowed(bool, lambda value: True, "True or False")
SOLVER = Allowed(str, lambda value: value in get_args(SolverName), ", ".join(get_args(SolverName)))
INVERSE_DTYPE = Allowed(str, lambda value: value in get_args(InverseDtype), "bfloat16, or None", optional=True)


@dataclass(frozen=True)
class KFACSettings:
    """The settings of `KFAC`, which documents them.

    Raises:
        ValueError: A value is out of range. The message names the setting, the value and what is allowed.
    """

    damping: float = field(default=1.5e-4, metadata={"allowed": POSITIVE})
    factor_update_steps: int = field(default=10, metadata={"allowed": COUNT})
    inv_update_steps: int = field(default=100, metadata={"allowed": COUNT})
    factor_decay: float = field(default=0.8, metadata={"allowed": BELOW_ONE})
    kl_clip: float | Auto | None = field(default="auto", metadata={"allowed": CLIP})
    lr: float = field(default=0.1, metadata={"allowed": FROM_ZERO})
    accumulation_steps: int = field(default=1, metadata={"allowed": COUNT})
    factor_fraction: float = field(default=1.0, metadata={"allowed": FRACTION})
    solver: SolverName = field(default="eigen", metadata={"allowed": SOLVER})
    stagger: bool = field(default=True, metadata={"allowed": BOOLEAN})
    spatially_uncorrelated: bool = field(default=False, metadata={"allowed": BOOLEAN})
    inv_dtype: InverseDtype | None = field(default=None, metadata={"allowed": INVERSE_DTYPE})
    grad_worker_fraction: float = field(default=1.0, metadata={"allowed": FRACTION})
    local_factors: bool = field(default=False, metadata={"allowed": BOOLEAN})

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value, allowed = setting.name, getattr(self, setting.name), setting.metadata["allowed"]
            fits = isinstance(value, allowed.kind) and isinstance(value, bool) == (allowed.kind is bool)
            if not (fits and allowed.fits(value)) and not (value is None and allowed.optional):
                raise ValueError(f"{name}: {value!r} is out of range; allowed: {allowed.text}")
