"""The engine of loaders: threads fill the next few batches while the consumer has one.

It is put together from three parts. A `Source` says which samples a batch has, and where their bytes are; a `Decoder`
puts a chunk of images into their slots; a `Delivery` gives memory for slots, and makes a `Batch` of those that are
full. How many batches are under way, waiting with a time limit, bad samples, and what a fork leaves behind are the same
for all.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from ..errors import DatapipeError, DecodeError
from ..sampling.order import slice_positions
from ..watched import wait_for
from .bad_budget import BadBudget
from .base import DataDescription, Loader, Place
from .batch import Batch
from .batch_slots import BatchSlots, ChunkReport
from .image_chunk import ImageChunk
from .options import LoaderOptions
from .threads import Pool, Threads

logger = logging.getLogger(__name__)

AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read


R = TypeVar("R")
SlotsT = TypeVar("SlotsT", bound=BatchSlots)
TakeBad = Callable[[int, Exception], None]  # called with a slot and the error


class Source(ABC):
    """Where the bytes of an epoch's samples come from.

    Attributes:
        num_readers: Threads that read ahead.
    """

    num_readers = 1

    @abstractmethod
    def batches(self, engine: Engine[SlotsT], epoch: int, steps: range, threads: Threads) -> Generator[SlotsT]:
        """Start work on a batch whenever the generator is asked for the next.

        Args:
            engine: Engine that fills slots.
            epoch: Number of the epoch, from 0.
            steps: Steps of the epoch, in order.
            threads: Threads of the loader.

        Yields:
            Slots from `engine.new_slots`, for which `engine.fill` was called, or is called by one of their tasks.
        """

    @abstractmethod
    def place(self, slots: BatchSlots, slot: int) -> Place:
        """Say where a slot's sample lies."""

    @abstractmethod
    def explain_wait(self) -> tuple[Place, str]:
        """Say which file a batch is being waited for, and in words what is known of it."""

    @abstractmethod
    def interrupt(self) -> None:
        """Have reads that pause, and commands that are read from, end."""

    @abstractmethod
    def forget_files(self) -> None:
        """In a forked process: files are better not shared with the parent."""

    @abstractmethod
    def close(self) -> None:
        """Release all files. Nothing reads any more, except a thread that hangs."""

    def identity(self) -> dict[str, int | str]:
        """Return what must be the same, too, for an epoch and a step to mean the same batches."""
        return {}


class Decoder(ABC, Generic[SlotsT]):
    """What makes pixels of encoded images."""

    chunk = 32  # images at a time: few enough to share a batch among threads, many enough for numpy's overhead

    @abstractmethod
    def put(self, slots: SlotsT, chunk: ImageChunk, take_bad: TakeBad) -> dict[str, float]:
        """In a thread: put images into their slots, until the batch is abandoned.

        Args:
            slots: The batch.
            chunk: The images.
            take_bad: Function called with the slot and the error for each that is damaged.

        Returns:
            The seconds of each stage.
        """


class Delivery(ABC, Generic[SlotsT]):
    """How batches come to where they are needed.

    Attributes:
        num_on_device: Batches that a device works on while the consumer has one.
    """

    num_on_device = 0

    @abstractmethod
    def new_slots(self, positions: np.ndarray, count: int) -> SlotsT:
        """In the consumer: make slots for one batch, `count` of them for samples."""

    @abstractmethod
    def put_nothing(self, slots: SlotsT, slot: int | slice) -> None:
        """In a thread: these slots stay empty."""

    @abstractmethod
    def begin(self, slots: SlotsT) -> None:
        """In the consumer: all slots are full, and work on a device may begin."""

    @abstractmethod
    def finish(self, slots: SlotsT, engine: Engine[SlotsT]) -> Batch:
        """In the consumer, for each batch that was begun, in order: wait for it."""

    @abstractmethod
    def set_size(self, size: int) -> None:
        """Give images another size; nothing is under way."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for what a device does with batches that were begun: the iteration has ended, without them."""

    @abstractmethod
    def close(self) -> None:
        """Release what a device holds."""


class Engine(Loader, Generic[SlotsT]):
    """A loader whose threads work ahead of the consumer.

    Args:
        data: The data set.
        options: Options of the loader.
        source, decoder, delivery: Parts of the loader, which closes them.

    Attributes:
        stage_s: Seconds that the threads have spent in each stage.
        read_bytes: Size of all samples that were read, in bytes.
        source, decoder, delivery: Parts of the loader, as given.
    """

    def __init__(
        self,
        data: DataDescription,
        options: LoaderOptions,
        source: Source,
        decoder: Decoder[SlotsT],
        delivery: Delivery[SlotsT],
    ) -> None:
        super().__init__(data, options)
        self.source, self.decoder, self.delivery = source, decoder, delivery
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        self.read_bytes = 0
        self._budget = BadBudget(options.max_bad, options.rank)
        self._threads: Threads | None = None
        self._process = os.getpid()

    def close(self) -> None:
        super().close()
        self._leave_parent()
        self.source.interrupt()  # first: a thread may pause for long before it reads again
        for pool in self._threads or ():
            pool.close()
        self.delivery.close()
        self.source.close()

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage; "queue_full" are those that threads were idle since the queue was full."""
        idle_s = self._threads.fill.idle_s() if self._threads else 0.0
        return {**self.stage_s, **super().stages(), "queue_full": idle_s}

    # --- in the consumer ---

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        self._leave_parent()
        if self._threads is None:
            self._threads = Threads(Pool(self.options.num_threads()), Pool(self.source.num_readers), Pool(1))
        started = self.source.batches(self, epoch, steps, self._threads)
        delivery = self.delivery
        being_filled: deque[SlotsT] = deque()
        begun: deque[SlotsT] = deque()
        try:
            while True:
                while len(being_filled) < AHEAD and (slots := next(started, None)) is not None:
                    being_filled.append(slots)
                while being_filled and len(begun) <= delivery.num_on_device:
                    self._wait_until_full(being_filled[0])
                    begun.append(being_filled.popleft())
                    delivery.begin(begun[-1])
                if not begun:
                    return
                yield delivery.finish(begun.popleft(), self)
        finally:
            for slots in being_filled:
                slots.abandon()
            started.close()
            delivery.drain()

    def positions(self, step: int) -> np.ndarray:
        """Return the positions of this rank's slice of a global batch, int64[batch_size]."""
        return slice_positions(step, self.options.batch_size, self.options.rank, self.options.world_size)

    def fill(self, slots: SlotsT, make: Callable[[slice], ImageChunk], threads: Threads) -> None:
        """Have threads fill a batch's slots.

        Args:
            slots: The batch, which has a sample for each of its first `count` slots.
            make: Function that returns the images of a chunk of those slots; called in a thread, for each chunk.
            threads: Threads of the loader.
        """
        for first in range(0, len(slots.positions), self.decoder.chunk):
            chunk = slice(first, min(first + self.decoder.chunk, len(slots.positions)))
            slots.tasks.append(threads.fill.submit(self._fill, slots, chunk, make))

    def identity(self) -> dict[str, int | str]:
        return {**super().identity(), **self.source.identity()}

    def wait_for(self, function: Callable[[], R]) -> R:
        """Call a function that reads, in a thread of its own, with the time limit of a batch; return its result."""
        pool = Pool(1)
        try:
            return wait_for(pool.submit(function), self.options.timeout_s, self._report_wait)
        finally:
            pool.close()

    def _wait_until_full(self, slots: SlotsT) -> None:
        for task in slots.tasks:
            report = wait_for(task, self.options.timeout_s, self._report_wait)
            if report is not None:
                self.read_bytes += report.read_bytes
                for stage, seconds in report.stage_s.items():
                    self.stage_s[stage] += seconds

    def _report_wait(self, waited_s: float, is_over: bool) -> None:
        place, details = self.source.explain_wait()
        message = f"waiting for a batch for {waited_s:.0f} s{details}"
        if is_over:
            raise DatapipeError(f"{message} (timeout_s={self.options.timeout_s:g})", **place)
        logger.warning("rank %d: %s", self.options.rank, DatapipeError(message, **place))

    def _leave_parent(self) -> None:
        """After a fork, forget the parent's threads, which do not survive it, and its files."""
        if self._process != os.getpid():
            self._process, self._threads = os.getpid(), None
            self.source.forget_files()

    def _take_size(self, size: int) -> None:
        super()._take_size(size)
        self.delivery.set_size(size)

    # --- in the threads ---

    def _fill(self, slots: SlotsT, chunk: slice, make: Callable[[slice], ImageChunk]) -> ChunkReport | None:
        if slots.abandoned:
            return None
        clock, began = time.perf_counter, time.perf_counter()
        stop = max(chunk.start, min(chunk.stop, slots.count))
        if stop < chunk.stop:
            self.delivery.put_nothing(slots, slice(stop, chunk.stop))
        if stop == chunk.start:
            return None
        images = make(slice(chunk.start, stop))
        stage_s = self.decoder.put(slots, images, partial(self.take_bad, slots))
        stage_s["other"] = clock() - began - sum(stage_s.values())
        return ChunkReport(stage_s, int(images.jobs["size"].sum()))

    def take_bad(self, slots: SlotsT, slot: int, error: Exception) -> None:
        """Leave a slot empty; or, when the budget of bad samples is spent, raise the error.

        Args:
            slots: The batch.
            slot: Slot of the bad sample.
            error: Error that says what is wrong with it; the sample's place is added.
        """
        if not isinstance(error, DatapipeError):
            error = DecodeError(str(error), **self.source.place(slots, slot))
        self._budget.spend(int(slots.samples[slot]), error)
        self.delivery.put_nothing(slots, slot)
        slots.valid[slot] = False
