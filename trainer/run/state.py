"""A run's progress: everything that a step changes, except the tensors."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..errors import BadStep, DivergedError
from ..ranks.world import World, sum_over_ranks

_RECENT_STEPS = 100  # whose median loss a spike is compared with
_FEWEST_RECENT = 20  # before which nothing is a spike
_LEAST_USUAL = 1e-3  # a median below that counts as that: where nearly all is learnt, a single image is a multiple
_MOST_PENDING = 1000  # losses on the device


class Losses:
    """The losses of the steps, and their means over all ranks since the last log line and since the epoch began.

    Beside them, how many of the epoch's images were classified correctly. All stay on the device until `read`, so that
    no step waits for the GPU.
    """

    def __init__(self, spike_factor: float | None = None) -> None:
        """Begin without any.

        Args:
            spike_factor: Factor by which a loss must exceed the median of the last losses to count as a spike; None:
                spikes are not looked for.
        """
        self._spike_factor = spike_factor
        self._pending: list[tuple[Tensor, Tensor, Sequence[Tensor]]] = []  # what `add` was given
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._line: list[float] = [0.0, 0]  # sum and number of steps
        self._epoch: list[float] = [0.0, 0]
        self._answers: list[float] = [0.0, 0]  # right ones, and images, of the epoch

    def add(self, loss: Tensor, samples: Tensor, answers: Sequence[Tensor] = ()) -> None:
        """Add a step.

        Args:
            loss: Its loss on this rank, a scalar.
            samples: Numbers of its samples, int64[B].
            answers: Number of images that were classified correctly, and number of images, int64[2], for each part of
                its batch; none if they are not known.
        """
        self._pending.append((loss.detach(), samples, answers))

    @property
    def is_full(self) -> bool:
        """Return whether it is time to `read`: each loss takes memory on the device."""
        return len(self._pending) >= _MOST_PENDING

    def read(self, world: World, step: int, has_finite_gradients: bool = True) -> None:
        """Wait for the device and average over the ranks, which must all call this at the same step.

        Args:
            world: This process's place among the ranks.
            step: Number of the last step that was added.
            has_finite_gradients: Whether its gradients are finite, or not known.

        Raises:
            DivergedError: A loss is not finite, or a spike; on all ranks.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        own = torch.stack([loss for loss, _, _ in pending]).tolist()  # waits once for the device
        answers = _sum_of_each([parts for _, _, parts in pending])
        sent = own if has_finite_gradients else [*own[:-1], math.nan]
        totals = sum_over_ranks(world, sent + answers)
        rights, counts = totals[len(own) :: 2], totals[len(own) + 1 :: 2]
        steps = zip(totals[: len(own)], rights, counts, own, pending, strict=True)
        first_step = step - len(pending) + 1
        for number, (total, right, count, loss, (_, samples, _)) in enumerate(steps, first_step):
            mean = total / world.world_size
            problem = self._find_problem(mean)
            if problem:
                what = "the loss" if has_finite_gradients or number < step else "the loss or its gradients"
                raise DivergedError(f"{what} {problem} at step {number}", BadStep(number, loss, samples.tolist()))
            self._recent.append(mean)
            for sums, value, parts in ((self._line, mean, 1), (self._epoch, mean, 1), (self._answers, right, count)):
                sums[0] += value
                sums[1] += parts

    def _find_problem(self, mean: float) -> str:
        if not math.isfinite(mean):
            return f"became {mean}"
        if self._spike_factor is not None and len(self._recent) >= _FEWEST_RECENT:
            times = mean / max(median(self._recent), _LEAST_USUAL)
            if times > self._spike_factor:
                return f"rose to {mean:.4g}, {times:.1f} times the median of the {len(self._recent)} steps before,"
        return ""

    def take_line(self) -> float:
        """Return the mean since the last call, for a log line; NaN where all steps were skipped."""
        return _take_mean(self._line)

    def take_epoch(self) -> float:
        """Return the mean since the last call, for an epoch; NaN where all steps were skipped."""
        return _take_mean(self._epoch)

    def take_accuracy(self) -> float:
        """Return the share of right answers since the last call, for an epoch; NaN where none is known."""
        return _take_mean(self._answers)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        sums = {"line": list(self._line), "epoch": list(self._epoch), "answers": list(self._answers)}
        return sums | {"recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; that of an earlier version knows no recent losses and answers."""
        self._pending.clear()
        unknown = math.nan if state["epoch"][1] else 0.0  # of an epoch that has begun
        self._answers = list(state.get("answers", [unknown, unknown]))
        self._line, self._epoch = list(state["line"]), list(state["epoch"])
        self._recent = deque(state.get("recent", []), _RECENT_STEPS)


def _take_mean(sums: list[float]) -> float:
    """Return a sum divided by its count, and set both to 0."""
    total, count = sums
    sums[:] = 0.0, 0
    return total / count if count else math.nan


def _sum_of_each(answers: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return right answers and images of each step in turn, the sums over the parts of its batch."""
    known = iter(torch.stack([part for parts in answers for part in parts]).tolist() if any(answers) else ())
    sums = [[next(known) for _ in parts] for parts in answers]
    return [sum(part[i] for part in parts) for parts in sums for i in range(2)]


@dataclass
class State:
    """A run's progress."""

    losses: Losses
    epoch: int = 0
    """Number of finished epochs."""
    step: int = 0
    """Number of finished optimizer steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """All so far, in order: epoch, elapsed_s, accuracy, loss."""
    saved: tuple[int, int] | None = None
    """Epoch and step of the run's checkpoint, if there is one."""
    saved_at: float = field(default_factory=time.monotonic)
    """When the last checkpoint was, or the first would have been: `time.monotonic()`."""
    failed_saves: int = 0
    """Checkpoints in a row that could not be written."""
    longest_save_s: float = 0.0
    """Longest time that a checkpoint took to write, in seconds, while training continued."""
    lr_factor: float = 1.0
    """By which the schedule's learning rate is multiplied, since the run was rolled back."""
    recoveries: int = 0
    """How often a step was skipped, or the run rolled back."""
    line_begun: tuple[int, float] = (0, 0.0)
    """Steps, and seconds of training, at the last line of the metrics."""

    @property
    def accuracy(self) -> float | None:
        """Return the last evaluation's accuracy, from 0 to 1."""
        return self.evaluations[-1]["accuracy"] if self.evaluations else None

    @property
    def best_accuracy(self) -> float | None:
        """Return the highest accuracy so far, from 0 to 1."""
        return max((each["accuracy"] for each in self.evaluations), default=None)

    def time_to(self, target: float | None) -> float | None:
        """Return the seconds of training until the first evaluation that reached `target`, if there is one."""
        if target is None:
            return None
        return next((each["elapsed_s"] for each in self.evaluations if each["accuracy"] >= target), None)

    def status(self, target: float | None, epochs: int) -> str | None:
        """Return how the run has ended; None if it is not at its end."""
        if self.time_to(target) is not None:
            return "target_reached"
        if self.epoch >= epochs:
            return "completed" if target is None else "target_missed"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "evaluations": [dict(each) for each in self.evaluations],
            "loss": self.losses.state_dict(),
            "lr_factor": self.lr_factor,
            "recoveries": self.recoveries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.evaluations = [dict(each) for each in state["evaluations"]]
        self.losses.load_state_dict(state["loss"])
        self.lr_factor, self.recoveries = state.get("lr_factor", 1.0), state.get("recoveries", 0)  # not in earlier ones
