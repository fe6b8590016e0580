"""How far a run has come: everything that a step changes, apart from the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .distributed import World, sum_over_ranks
from .errors import DivergedError


class MeanLoss:
    """Mean training loss since the last log line and since the epoch began, over all ranks.

    Losses stay on the device until `read`, so that no step waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pending = torch.zeros((), dtype=torch.float64, device=device)
        self._pending_steps = 0
        self._line = [0.0, 0]  # sum and number of steps
        self._epoch = [0.0, 0]

    def add(self, loss: Tensor) -> None:
        self._pending += loss.detach()
        self._pending_steps += 1

    def read(self, world: World, step: int, failed: bool = False) -> bool:
        """Wait for the device and sum over the ranks, which must all call this at the same `step`.

        Returns whether any rank has `failed`, where there were losses to read. Raises DivergedError, on all of them,
        if the loss is not finite.
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
        """The mean since the last call."""
        mean = self._line[0] / max(1, self._line[1])
        self._line = [0.0, 0]
        return mean

    def take_epoch(self) -> float:
        """The mean since the last call."""
        mean = self._epoch[0] / max(1, self._epoch[1])
        self._epoch = [0.0, 0]
        return mean

    def state_dict(self) -> dict:
        return {"line": list(self._line), "epoch": list(self._epoch)}

    def load_state_dict(self, state: dict) -> None:
        self._line, self._epoch = list(state["line"]), list(state["epoch"])


@dataclass
class State:
    """`epoch` epochs are finished and `step` optimizer steps done; `evaluations` are all so far, in order.

    `saved`: the epoch and the step of RUN's checkpoint, if there is one.
    """

    loss: MeanLoss
    epoch: int = 0
    step: int = 0
    evaluations: list[dict] = field(default_factory=list)  # epoch, elapsed_s, accuracy, loss
    saved: tuple[int, int] | None = None

    @property
    def accuracy(self) -> float | None:
        return self.evaluations[-1]["accuracy"] if self.evaluations else None

    @property
    def best_accuracy(self) -> float | None:
        return max((each["accuracy"] for each in self.evaluations), default=None)

    def time_to(self, target: float | None) -> float | None:
        """Seconds of training until the first evaluation that reached `target`."""
        if target is None:
            return None
        return next((each["elapsed_s"] for each in self.evaluations if each["accuracy"] >= target), None)

    def status(self, target: float | None, epochs: int) -> str | None:
        """How the run has ended, or None if it goes on."""
        if self.time_to(target) is not None:
            return "target_reached"
        if self.epoch >= epochs:
            return "completed" if target is None else "target_missed"
        return None

    def state_dict(self) -> dict:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "evaluations": [dict(each) for each in self.evaluations],
            "loss": self.loss.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.step = state["epoch"], state["step"]
        self.evaluations = [dict(each) for each in state["evaluations"]]
        self.loss.load_state_dict(state["loss"])
