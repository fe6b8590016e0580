"""Those settings of a run's recipe that advice depends on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SETTING_SECTIONS = dict.fromkeys(("size", "start_size", "eval_size", "crop", "backend", "order", "io", "cache"), "data")
SETTING_SECTIONS |= {"preconditioner": "optimizer", "grad_worker_fraction": "kfac"}


class RecipeSettings(NamedTuple):
    """Those settings of a recipe that advice depends on, with their defaults; 0 or "" where the recipe has "none".

    They are in the recipe's section `train`, except those in SETTING_SECTIONS, and described there.
    """

    size: int = 0
    start_size: int = 0
    eval_size: int = 0
    crop: str = "auto"
    backend: str = "cpu"
    order: str = "full"
    io: str = ""
    cache: str = ""
    preconditioner: str = "none"
    grad_worker_fraction: float = 1.0
    batch_size: int = 0
    accumulation_steps: int = 1
    gradient_dtype: str = "float32"
    bucket_mib: int = 25
    powersgd_rank: int = 0
    powersgd_start_step: int = 1000
    precision: str = "auto"
    channels_last: bool = True
    compile_mode: str = "default"
    when_diverged: str = "stop"
    evaluate_every: int = 1
    evaluate_mirrored: bool = False
    checkpoint_every_minutes: float = 10.0


def read_settings(recipe: Mapping[str, Any]) -> RecipeSettings:
    """Return a recipe's settings; those that are missing or of another type, as in an old file, have their defaults."""
    values = {}
    for name, default in RecipeSettings._field_defaults.items():
        section = recipe.get(SETTING_SECTIONS.get(name, "train"))
        value = section.get(name, default) if isinstance(section, dict) else default
        value = type(default)() if value is None else value
        values[name] = value if type(value) is type(default) else default
    return RecipeSettings(**values)
