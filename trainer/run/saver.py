"""The thread that writes a checkpoint, and what came of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from datapipe import clock

from ..checkpoints.snapshot import Snapshot
from ..ranks.world import World

logger = logging.getLogger(__name__)


class Pending(NamedTuple):
    """A checkpoint that is being written."""

    place: tuple[int, int]  # epoch and step
    may_fail: bool
    thread: threading.Thread
    errors: list[BaseException]  # of this rank's thread: one, or none


class Saver:
    """Writes checkpoints, one at a time.

    Attributes:
        snapshot: Copies of what is being written.
        group: The ranks' connection for it, apart from that of the training; None for one rank.
        longest_s: Longest time that one took, in seconds.
    """

    def __init__(self, world: World) -> None:
        self.snapshot = Snapshot()
        self.group = dist.new_group(backend="gloo", timeout=clock.OUTLASTS_ALL) if world.world_size > 1 else None
        self.longest_s = 0.0
        self._pending: Pending | None = None

    def begin(self, write: Callable[[], None], place: tuple[int, int], may_fail: bool) -> None:
        """Call a function in a thread; none may be under way.

        Args:
            write: Function that writes the checkpoint.
            place: Epoch and step of the checkpoint.
            may_fail: Whether training continues where it cannot be written.
        """
        errors: list[BaseException] = []

        def run() -> None:
            began = clock.now()
            try:
                write()
            except BaseException as error:
                errors.append(error)
            self.longest_s = max(self.longest_s, clock.now() - began)

        thread = threading.Thread(target=run, name="trainer-saving", daemon=True)
        self._pending = Pending(place, may_fail, thread, errors)
        thread.start()

    def take(self) -> Pending | None:
        """Return what is under way, or has ended, and forget it."""
        pending, self._pending = self._pending, None
        return pending

    def close(self, limit_s: float | None = None) -> None:
        """Wait for what is under way, in a run that has failed; its error is logged."""
        pending = self.take()
        if pending is not None:
            pending.thread.join(limit_s)
            for error in pending.errors:
                logger.error("no checkpoint of step %d: %s", pending.place[1], error)
