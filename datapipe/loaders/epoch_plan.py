"""What is worked out of an epoch before its first batch, in a thread, while the batches before it run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

STEPS_TO_PLAN = 16  # before an epoch's end the next one is planned: the order of 1.28 million samples takes 0.15 s


class EpochPart(NamedTuple):
    """Steps of an epoch, and what else decides on their samples."""

    epoch: int  # from 0
    lanes: int  # of the order "blocks"
    steps: range


class LastPlan:
    """The plan that was begun last: what a source's `plan_epoch` returns."""

    def __init__(self) -> None:
        self._last: tuple[EpochPart, Future[Any]] | None = None

    def get(self, part: EpochPart, begin: Callable[[EpochPart], Future[Any]]) -> Future[Any]:
        """Return the plan of a part, and begin it if the last one is another's, which is dropped."""
        if self._last is None or self._last[0] != part:
            if self._last is not None:
                self._last[1].cancel()
            self._last = part, begin(part)
        return self._last[1]
