"""The learning rate of each step, as pure functions: no history is needed to know the rate of a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .settings import Count, Fraction, FromZero, Positive, Section, or_none


class _AnySchedule(Section):
    for_epochs: Annotated[Count | None, or_none()] = None
    """Length of the run, in epochs, for which the epochs of this section and of `kfac` are meant: with another
    `train.epochs` they scale, except those that --set gives. "none": they stay as they are."""

    def factor(self, share: float, epoch: float) -> float:
        """Return the factor of the peak rate, once a share of the steps after the warm-up is over, at an epoch."""
        return 1.0


class _Schedule(_AnySchedule):
    warmup_epochs: FromZero = 0.0
    """Length of the linear warm-up, in epochs; 0: none."""
    warmup_start: Fraction = 0.0
    """Rate at the beginning of the warm-up, as a fraction of the peak rate."""


class ConstantSchedule(_Schedule):
    """The peak rate throughout, after the warm-up."""

    name: Literal["constant"]
    """Kind of schedule."""


class StepSchedule(_Schedule):
    """A rate that falls by a factor at certain epochs."""

    name: Literal["step"]
    """Kind of schedule."""
    milestones: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    """Epochs, rising, at each of which the rate is multiplied by `gamma`."""
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor by which the rate falls at each milestone."""

    @model_validator(mode="after")
    def _rising(self) -> StepSchedule:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones = {list(self.milestones)}: must rise")
        return self

    def factor(self, share: float, epoch: float) -> float:
        return self.gamma ** bisect_right(self.milestones, epoch)


class CosineSchedule(_Schedule):
    """Half a cosine, from the peak rate after the warm-up to `final` at the end of the run."""

    name: Literal["cosine"]
    """Kind of schedule."""
    final: Fraction = 0.0
    """Rate at the end of the run, as a fraction of the peak rate."""

    def factor(self, share: float, epoch: float) -> float:
        return _between(self.final, 1.0, (1.0 + math.cos(math.pi * share)) / 2.0)


class OneCycleSchedule(_AnySchedule):
    """A triangle over the run: linear from `start` to the peak rate, then linear to `final` (Smith and Topin 2017)."""

    name: Literal["onecycle"]
    """Kind of schedule."""
    peak_at: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Where in the run the rate peaks, as a fraction of all steps."""
    start: Fraction = 0.0
    """Rate of the first step, as a fraction of the peak rate."""
    final: Fraction = 0.0
    """Rate at the end of the run, as a fraction of the peak rate."""

    def factor(self, share: float, epoch: float) -> float:
        if share < self.peak_at:
            return _between(self.start, 1.0, share / self.peak_at)
        return _between(1.0, self.final, (share - self.peak_at) / (1.0 - self.peak_at))


class PolynomialSchedule(_Schedule):
    """A power of the fraction of the run that is left after the warm-up, from the peak rate to `final` at the end."""

    name: Literal["polynomial"]
    """Kind of schedule."""
    power: Positive = 2.0
    """The exponent; 1: a straight line."""
    final: Fraction = 0.0
    """Rate at the end of the run, as a fraction of the peak rate."""

    def factor(self, share: float, epoch: float) -> float:
        return _between(self.final, 1.0, (1.0 - share) ** self.power)


Schedule = Annotated[
    ConstantSchedule | StepSchedule | CosineSchedule | OneCycleSchedule | PolynomialSchedule,
    Field(discriminator="name"),
]


def scaled_lr(lr: float, scaling: str, global_batch_size: int, lr_batch_size: int | None) -> float:
    """Return the peak learning rate for a batch size, from one that is meant for another.

    Args:
        lr: Learning rate that is meant for `lr_batch_size`.
        scaling: "linear" keeps the sum of updates per sample (Goyal et al. 2017, section 2.1); "sqrt" keeps the
            variance of the update (Krizhevsky 2014, arXiv:1404.5997, section 5); "none" returns `lr`.
        global_batch_size: Images per step, over all ranks.
        lr_batch_size: The batch size that `lr` is meant for; needed unless `scaling` is "none".

    Returns:
        The peak learning rate for `global_batch_size`.

    Raises:
        ValueError: `lr_batch_size` is missing.
    """
    if scaling == "none":
        return lr
    if lr_batch_size is None:
        raise ValueError(f"lr_scaling = {scaling!r} needs lr_batch_size, the batch that lr is for")
    ratio = global_batch_size / lr_batch_size
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))


def multiplier(settings: Schedule, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the factor by which the peak learning rate is multiplied at one optimizer step.

    The warm-up takes `ceil(warmup_epochs * steps_per_epoch)` steps; the first step after it has the full rate.

    Args:
        settings: The schedule.
        step: Number of the optimizer step in the run, from 0.
        steps_per_epoch: Optimizer steps per epoch.
        epochs: Epochs of the run.

    Returns:
        The factor, from 0 to 1.
    """
    warmup_steps = 0
    if not isinstance(settings, OneCycleSchedule):
        warmup_steps = math.ceil(settings.warmup_epochs * steps_per_epoch)
        if step < warmup_steps:
            return _between(settings.warmup_start, 1.0, step / warmup_steps)
    share = min((step - warmup_steps) / max(1, steps_per_epoch * epochs - warmup_steps), 1.0)
    return settings.factor(share, step / steps_per_epoch)


def last_change(settings: Schedule) -> tuple[str, float]:
    """Return the setting that names the last epoch at which a schedule changes its course, and that epoch."""
    if isinstance(settings, OneCycleSchedule):
        return "peak_at", 0.0
    if isinstance(settings, StepSchedule) and settings.milestones[-1] > settings.warmup_epochs:
        return "milestones", settings.milestones[-1]
    return "warmup_epochs", settings.warmup_epochs


def _between(start: float, end: float, fraction: float) -> float:
    return start + (end - start) * fraction
