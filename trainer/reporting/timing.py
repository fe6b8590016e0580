"""A clock that says where a run's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .runlog import BESIDE_TRAINING, SECTIONS


class Clock:
    """The seconds that a run takes, by section, in total and since the epoch began; continues after a resume.

    On a GPU, steps are timed by events that are read when `drain` is called, after the host has waited for the GPU
    anyway. "wait" is then the time for which the GPU had nothing to do because a batch was late.
    """

    def __init__(self) -> None:
        self._cuda = False
        self._time_s = dict.fromkeys(SECTIONS[:-1], 0.0)
        self._before_s = 0.0  # what earlier runs of this training took
        self._started = time.perf_counter()
        self._epoch_start = dict.fromkeys(SECTIONS, 0.0)
        self._steps: list[tuple[float, Any, Any, Any]] = []
        self._last_end: Any = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run began, without those from a stop to the first step after a resume."""
        return self._before_s + time.perf_counter() - self._started

    @property
    def training_s(self) -> float:
        """Return the elapsed seconds without the start, evaluations and checkpoints."""
        return self.elapsed_s - sum(self._time_s[section] for section in BESIDE_TRAINING)

    def use(self, device: torch.device) -> None:
        """Time the steps of this device."""
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return this moment in the device's work, for `add_step`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_step(self, waited_s: float, begin: Any, middle: Any, end: Any) -> None:
        """Add one step.

        Args:
            waited_s: Time that the host waited for the step's batch, in seconds.
            begin: Mark before the forward pass.
            middle: Mark between the backward pass and the update.
            end: Mark after the update.
        """
        self._steps.append((waited_s, begin, middle, end))

    def drain(self) -> None:
        """Count the steps added so far, waiting for the device to finish them."""
        if self._cuda and self._steps:
            self._steps[-1][3].synchronize()
        for waited_s, begin, middle, end in self._steps:
            if self._last_end is not None:
                waited_s = min(waited_s, self._between(self._last_end, begin))
            self._last_end = end
            self._time_s["wait"] += waited_s
            self._time_s["forward_backward"] += self._between(begin, middle)
            self._time_s["optimizer"] += self._between(middle, end)
        self._steps.clear()

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block, which must end with the host waiting for the device, under `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._time_s[name] += time.perf_counter() - started

    def end_start(self) -> None:
        """Count what has passed so far, and is in no section, as the run's start."""
        self._time_s["start"] += self.total()["other"]

    def total(self) -> dict[str, float]:
        """Return the seconds per section since the training began; "other" is the time outside all others."""
        return self._time_s | {"other": max(0.0, self.elapsed_s - sum(self._time_s.values()))}

    def epoch(self) -> dict[str, float]:
        """Return the seconds per section since the epoch began."""
        return {section: max(0.0, s - self._epoch_start[section]) for section, s in self.total().items()}

    def begin_epoch(self) -> None:
        """Let `epoch` count from now on."""
        self._epoch_start = self.total()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "elapsed_s": self.elapsed_s,
            "time_s": dict(self._time_s),
            "epoch_start": dict(self._epoch_start),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; that of an earlier version knows fewer sections."""
        self._before_s, self._started = state["elapsed_s"], time.perf_counter()
        self._time_s = dict.fromkeys(SECTIONS[:-1], 0.0) | state["time_s"]
        self._epoch_start = dict.fromkeys(SECTIONS, 0.0) | state["epoch_start"]
