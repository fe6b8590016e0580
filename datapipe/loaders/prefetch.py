"""The engine of all loaders: threads fill the next few batches while the consumer has one.

A backend starts work on batches, and turns each, when all its slots are full, into a `Batch`. How many are under way,
waiting with a time limit, bad samples, and what a fork leaves behind are the same for all.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..dataset.shard_files import Data
from ..errors import DatapipeError, DecodeError
from ..images.window import Box
from ..sampling.order import slice_positions
from .bad_budget import BadBudget
from .base import Batch, DataDescription, Loader, Place
from .options import LoaderOptions
from .threads import Pool, wait_for

logger = logging.getLogger(__name__)

AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read
CHUNK = 32  # samples: small enough to share a batch among threads, large enough for numpy's overhead


class ChunkReport(NamedTuple):
    """What a task in a thread took."""

    stage_s: dict[str, float]  # seconds, by stage
    read_bytes: int  # of samples


class BatchSlots:
    """A batch being filled: a slot for each position, of which the first `count` have a sample; the rest is padding."""

    def __init__(self, positions: np.ndarray, count: int) -> None:
        self.positions = positions
        self.valid = np.arange(len(positions)) < count
        self.samples = np.full(len(positions), -1, np.int64)
        self.labels = np.zeros(len(positions), np.int64)
        self.tasks: list[Future[ChunkReport | None]] = []  # that fill it; a task may add others before it is done
        self.stop = np.zeros(1, np.uint8)  # not 0 once abandoned: the decoder in C looks at it, too

    @property
    def abandoned(self) -> bool:
        return bool(self.stop[0])

    def abandon(self) -> None:
        """Have nothing more done. A thread stops after its sample, and keeps the memory until then."""
        self.stop[0] = 1
        for task in self.tasks:
            task.cancel()


class PendingImage(NamedTuple):
    """An image on its way into a slot."""

    slot: int
    sample: int
    data: Data  # encoded
    size: tuple[int, int]  # width and height in pixels, for which `box` was drawn
    box: Box
    scale: int  # see `augment.scales`
    flip: bool


class Threads(NamedTuple):
    """The threads of a loader, in one process."""

    fill: Pool
    read: Pool  # that read ahead, in order


SlotsT = TypeVar("SlotsT", bound=BatchSlots)


class PrefetchLoader(Loader, Generic[SlotsT]):
    """A loader whose threads work ahead of the consumer.

    Attributes:
        num_readers: Threads that read ahead.
        num_on_device: Batches that a device works on while the consumer has one.
        stage_s: Seconds that the threads have spent in each stage.
        read_bytes: Of samples, in all.
    """

    num_readers = 1
    num_on_device = 0

    def __init__(self, data: DataDescription, options: LoaderOptions) -> None:
        super().__init__(data, options)
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        self.read_bytes = 0
        self._budget = BadBudget(options.max_bad, options.rank)
        self._threads: Threads | None = None
        self._process = os.getpid()

    def close(self) -> None:
        super().close()
        self._leave_parent()
        self._interrupt()  # first: a thread may pause for long before it reads again
        for pool in self._threads or ():
            pool.close()

    def stages(self) -> dict[str, float]:
        return {**self.stage_s, **super().stages()}

    # --- for the backends ---

    @abstractmethod
    def _start_batches(self, epoch: int, steps: range, threads: Threads) -> Generator[SlotsT]:
        """Start work on a batch whenever the generator is asked for the next: give its slots, with their tasks."""

    @abstractmethod
    def _put(self, slots: SlotsT, images: list[PendingImage]) -> dict[str, float]:
        """In a thread: put images into their slots; return the seconds of each stage.

        Calls `_take_bad` for what cannot be decoded.
        """

    @abstractmethod
    def _put_nothing(self, slots: SlotsT, slot: int | slice) -> None:
        """In a thread: these slots stay empty."""

    def _begin(self, slots: SlotsT) -> None:
        """In the consumer: all slots are full, and work on a device may begin."""

    @abstractmethod
    def _finish(self, slots: SlotsT) -> Batch:
        """In the consumer, for each batch that was begun, in order: wait for it."""

    def _drain(self) -> None:
        """Wait for what a device does with batches that were begun: the iteration has ended, without them."""

    @abstractmethod
    def _place(self, slots: SlotsT, slot: int) -> Place:
        """Say where a slot's sample lies."""

    @abstractmethod
    def _explain_wait(self) -> tuple[Place, str]:
        """Say which file a batch is being waited for, and in words what is known of it."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Have reads that pause, and commands that are read from, end."""

    @abstractmethod
    def _forget_files(self) -> None:
        """In a forked process: files are better not shared with the parent."""

    # --- in the consumer ---

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        self._leave_parent()
        if self._threads is None:
            self._threads = Threads(Pool(self.options.num_threads()), Pool(self.num_readers))
        started = self._start_batches(epoch, steps, self._threads)
        being_filled: deque[SlotsT] = deque()
        begun: deque[SlotsT] = deque()
        try:
            while True:
                while len(being_filled) < AHEAD and (slots := next(started, None)) is not None:
                    being_filled.append(slots)
                while being_filled and len(begun) <= self.num_on_device:
                    self._wait_until_full(being_filled[0])
                    begun.append(being_filled.popleft())
                    self._begin(begun[-1])
                if not begun:
                    return
                yield self._finish(begun.popleft())
        finally:
            for slots in being_filled:
                slots.abandon()
            started.close()
            self._drain()

    def _wait_until_full(self, slots: SlotsT) -> None:
        for task in slots.tasks:
            report = wait_for(task, self.options.timeout_s, self._report_wait)
            if report is not None:
                self.read_bytes += report.read_bytes
                for stage, seconds in report.stage_s.items():
                    self.stage_s[stage] += seconds

    def _report_wait(self, waited_s: float, is_over: bool) -> None:
        place, details = self._explain_wait()
        message = f"waiting for a batch for {waited_s:.0f} s{details}"
        if is_over:
            raise DatapipeError(f"{message} (timeout_s={self.options.timeout_s:g})", **place)
        logger.warning("rank %d: %s", self.options.rank, DatapipeError(message, **place))

    def _leave_parent(self) -> None:
        """After a fork, forget the parent's threads, which do not survive it, and its files."""
        if self._process != os.getpid():
            self._process, self._threads = os.getpid(), None
            self._forget_files()

    def _positions(self, step: int) -> np.ndarray:
        """Return the positions of this rank's slice of a global batch, int64[batch_size]."""
        return slice_positions(step, self.options.batch_size, self.options.rank, self.options.world_size)

    # --- in the threads ---

    def _take_bad(self, slots: SlotsT, slot: int, error: Exception) -> None:
        """Leave a slot empty; or, when the budget is spent, raise the error with the sample's place."""
        if not isinstance(error, DatapipeError):
            error = DecodeError(str(error), **self._place(slots, slot))
        self._budget.spend(int(slots.samples[slot]), error)
        self._put_nothing(slots, slot)
        slots.valid[slot] = False
