"""The settings of K-FAC, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from .solvers import SOLVERS

WHOLE = Integral, lambda value: value >= 1, "whole numbers from 1"
EITHER = bool, lambda value: True, "True or False"
ALLOWED = {
    "damping": (Real, lambda value: 0 < value < math.inf, "above 0"),
    "factor_update_steps": WHOLE,
    "inv_update_steps": WHOLE,
    "factor_decay": (Real, lambda value: 0 <= value < 1, "from 0 to below 1"),
    "kl_clip": (Real, lambda value: 0 < value < math.inf, "above 0, or None"),
    "lr": (Real, lambda value: 0 <= value < math.inf, "from 0"),
    "accumulation_steps": WHOLE,
    "factor_fraction": (Real, lambda value: 0 < value <= 1, "above 0 to 1"),
    "solver": (str, lambda value: value in SOLVERS, ", ".join(SOLVERS)),
    "stagger": EITHER,
    "spatially_uncorrelated": EITHER,
    "inv_dtype": (str, lambda value: value == "bfloat16", "bfloat16, or None"),
    "grad_worker_fraction": (Real, lambda value: 0 < value <= 1, "above 0 to 1"),
    "local_factors": EITHER,
}
CHANGEABLE = "damping", "factor_update_steps", "inv_update_steps", "factor_decay", "kl_clip", "lr"


@dataclass
class KFACSettings:
    """See `KFAC`. Raises ValueError naming the setting, its value and what is allowed."""

    damping: float = 0.003
    factor_update_steps: int = 10
    inv_update_steps: int = 100
    factor_decay: float = 0.95
    kl_clip: float | None = 0.001
    lr: float = 0.1
    accumulation_steps: int = 1
    factor_fraction: float = 1.0
    solver: str = "eigen"
    stagger: bool = True
    spatially_uncorrelated: bool = False
    inv_dtype: str | None = None
    grad_worker_fraction: float = 1.0
    local_factors: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        kind, fits, allowed = ALLOWED[name]
        good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool) and fits(value)
        if not good and not (value is None and name in ("kl_clip", "inv_dtype")):
            raise ValueError(f"{name}: {value!r} is out of range; allowed: {allowed}")
        object.__setattr__(self, name, value)
