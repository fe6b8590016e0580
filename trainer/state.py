"""A run's progress: everything that a step changes, except the tensors."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .distributed import World, sum_over_ranks
from .errors import DivergedError


class MeanLoss:
    """The mean training loss over all ranks, since the last log line and since the epoch began.

    Losses stay on the device until `read`, so that no step waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pending = torch.zeros((), dtype=torch.float64, device=device)
        self._pending_steps = 0
        self._line: list[float] = [0.0, 0]  # sum and number of steps
        self._epoch: list[float] = [0.0, 0]

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step on this rank, a scalar."""
        self._pending += loss.detach()
        self._pending_steps += 1

    def read(self, world: World, step: int, failed: bool = False) -> bool:
        """Wait for the device and sum over the ranks, which must all call this at the same step.

        Args:
            world: This process's place among the ranks.
            step: Number of the step, for messages.
            failed: Whether something else failed on this rank.

        Returns:
            Whether anything failed on any rank; False where there was no loss to read.

        Raises:
            DivergedError: The loss is not finite; on all ranks.
        """
        if not self._pending_steps:
            return False
        total, failures = sum_over_ranks(world, [self._pending.item(), float(failed)])
        if not math.isfinite(total):
            raise DivergedError(f"the loss became {total} in the {self._pending_steps} steps up to step {step}")
        for sums in (self._line, self._epoch):
            sums[0] += total / world.world_size
            sums[1] += self._pending_steps
        self._pending.zero_()
        self._pending_steps = 0
        return failures > 0

    def take_line(self) -> float:
        """Return the mean since the last call, for a log line."""
        mean = self._line[0] / max(1, self._line[1])
        self._line = [0.0, 0]
        return mean

    def take_epoch(self) -> float:
        """Return the mean since the last call, for an epoch."""
        mean = self._epoch[0] / max(1, self._epoch[1])
        self._epoch = [0.0, 0]
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"line": list(self._line), "epoch": list(self._epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._line, self._epoch = list(state["line"]), list(state["epoch"])


@dataclass
class State:
    """A run's progress."""

    loss: MeanLoss
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
            "loss": self.loss.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.evaluations = [dict(each) for each in state["evaluations"]]
        self.loss.load_state_dict(state["loss"])
