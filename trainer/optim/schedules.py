"""The learning rate of each step, as pure functions: what a run does at a step needs no history to know."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.recipe import CosineSchedule, OneCycleSchedule, Schedule, StepSchedule


def scaled_lr(lr: float, scaling: str, global_batch_size: int, lr_batch_size: int | None) -> float:
    """The peak learning rate for `global_batch_size`, where `lr` is meant for `lr_batch_size`.

    `linear` keeps the sum of updates per sample (Goyal et al. 2017, section 2.1), `sqrt` the variance of
    the update (Krizhevsky 2014, arXiv:1404.5997, section 5), `none` returns `lr`.
    """
    if scaling == "none":
        return lr
    ratio = global_batch_size / lr_batch_size
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))


def multiplier(settings: Schedule, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (from 0) of the run.

    Warm-up takes `ceil(warmup_epochs * steps_per_epoch)` steps; the first step after it has the full rate.
    """
    if settings.name == "onecycle":
        return _one_cycle(settings, step, steps_per_epoch * epochs)
    warmup_steps = math.ceil(settings.warmup_epochs * steps_per_epoch)
    if step < warmup_steps:
        return _between(settings.warmup_start, 1.0, step / warmup_steps)
    match settings.name:
        case "constant":
            return 1.0
        case "step":
            return _drops(settings, step / steps_per_epoch)
        case "cosine":
            return _cosine(settings, step - warmup_steps, steps_per_epoch * epochs - warmup_steps)
    raise KeyError(settings.name)


def _drops(settings: StepSchedule, epoch: float) -> float:
    return settings.gamma ** bisect_right(settings.milestones, epoch)


def _cosine(settings: CosineSchedule, step: int, total_steps: int) -> float:
    fraction = min(step / total_steps, 1.0)
    return _between(settings.final, 1.0, (1.0 + math.cos(math.pi * fraction)) / 2.0)


def _one_cycle(settings: OneCycleSchedule, step: int, total_steps: int) -> float:
    """Smith & Topin 2017, arXiv:1708.07120: one triangle over the run."""
    fraction = min(step / total_steps, 1.0)
    if fraction < settings.peak_at:
        return _between(settings.start, 1.0, fraction / settings.peak_at)
    return _between(1.0, settings.final, (fraction - settings.peak_at) / (1.0 - settings.peak_at))


def _between(start: float, end: float, fraction: float) -> float:
    return start + (end - start) * fraction
