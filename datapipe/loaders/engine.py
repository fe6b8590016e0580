"""The engine of loaders: threads fill the next few batches while the consumer has one.

It is put together from three parts. A source says which samples a batch has, and where their bytes are; a decoder puts
a chunk of images into their slots; a delivery gives memory for slots, and makes a `Batch` of those that are full. How
many batches are under way, waiting with a time limit, bad samples, and what a fork leaves behind are the same for all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np

from ..errors import DatapipeError, DecodeError
from ..watched import wait_for
from .base import DataDescription, Loader, Place
from .batch import Batch
from .batch_slots import BatchSlots, ChunkReport
from .image_chunk import ImageChunk
from .options import LoaderOptions
from .threads import Pool, Threads

logger = logging.getLogger(__name__)

AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read

_R = TypeVar("_R")
SlotsT = TypeVar("SlotsT", bound=BatchSlots)


class SampleSource(ABC):
    """Where the bytes of an epoch's samples come from.

    Attributes:
        num_readers: Threads that read ahead.
    """

    num_readers = 1

    @abstractmethod
    def batches(self, engine: Engine[SlotsT], epoch: int, steps: range) -> Generator[SlotsT]:
        """Start work on a batch whenever the generator is asked for the next.

        Args:
            engine: Engine that fills slots.
            epoch: Number of the epoch, from 0.
            steps: Steps of the epoch, in order.

        Yields:
            Slots of the delivery, for which `engine.fill` was called, or is called by one of their tasks.
        """

    @abstractmethod
    def images(self, engine: Engine[SlotsT], slots: SlotsT, chunk: slice) -> ImageChunk:
        """In a thread: return the images of a chunk of slots, all of which have a sample.

        Args:
            engine: Engine that fills the slots.
            slots: The batch.
            chunk: Slots of the chunk.
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

    def close(self) -> None:  # noqa: B027 - most streams end by themselves
        """Release all files. Nothing reads any more, except a thread that hangs."""

    def identity(self) -> dict[str, int | str]:
        """Return what must be the same, too, for an epoch and a step to mean the same batches."""
        return {}


class Decoder(ABC, Generic[SlotsT]):
    """What makes pixels of encoded images."""

    chunk = 32  # images at a time: few enough to share a batch among threads, many enough for numpy's overhead

    @abstractmethod
    def put(self, slots: SlotsT, chunk: ImageChunk) -> dict[str, float]:
        """In a thread: put images into their slots, until the batch is abandoned, and the errors of others into
        `chunk.bad`. Returns the seconds of each stage."""


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
        source: SampleSource,
        decoder: Decoder[SlotsT],
        delivery: Delivery[SlotsT],
    ) -> None:
        super().__init__(data, options)
        self.source, self.decoder, self.delivery = source, decoder, delivery
        self.stage_s: defaultdict[str, float] = defaultdict(float)
        self.read_bytes = 0
        self._bad: set[int] = set()  # samples
        self._lock = threading.Lock()
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
        started = self.source.batches(self, epoch, steps)
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

    @property
    def threads(self) -> Threads:
        """The threads of this loader, which are begun when they are first needed."""
        if self._threads is None:
            self._threads = Threads(Pool(self.options.num_threads()), Pool(self.source.num_readers), Pool(1))
        return self._threads

    def fill(self, slots: SlotsT) -> None:
        """Have threads fill a batch's slots, a chunk at a time, with the source's images."""
        for first in range(0, len(slots.positions), self.decoder.chunk):
            chunk = slice(first, min(first + self.decoder.chunk, len(slots.positions)))
            slots.tasks.append(self.threads.fill.submit(self._fill, slots, chunk))

    def identity(self) -> dict[str, int | str]:
        return {**super().identity(), **self.source.identity()}

    def wait_for(self, task: Future[_R]) -> _R:
        """Wait for a task of the threads with the time limit of a batch, and return its result."""
        return wait_for(task, self.options.timeout_s, self._report_wait)

    def _wait_until_full(self, slots: SlotsT) -> None:
        for task in slots.tasks:
            report = self.wait_for(task)
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

    def _fill(self, slots: SlotsT, chunk: slice) -> ChunkReport | None:
        if slots.abandoned:
            return None
        clock, began = time.perf_counter, time.perf_counter()
        stop = max(chunk.start, min(chunk.stop, slots.count))
        if stop < chunk.stop:
            self.delivery.put_nothing(slots, slice(stop, chunk.stop))
        if stop == chunk.start:
            return None
        images = self.source.images(self, slots, slice(chunk.start, stop))
        stage_s = self.decoder.put(slots, images)
        for slot, error in images.bad.items():
            self.take_bad(slots, slot, error)
        stage_s["other"] = clock() - began - sum(stage_s.values())
        return ChunkReport(stage_s, int(images.jobs["size"].sum()))

    def take_bad(self, slots: SlotsT, slot: int, error: Exception) -> None:
        """Leave a slot empty, and log why, once per sample; or raise the error: it is one more than `max_bad`.

        Args:
            slots: The batch.
            slot: Slot of the bad sample.
            error: Error that says what is wrong with it; the sample's place is added.
        """
        if not isinstance(error, DatapipeError):
            error = DecodeError(str(error), **self.source.place(slots, slot))
        sample, max_bad = int(slots.samples[slot]), self.options.max_bad
        with self._lock:
            is_new = sample not in self._bad
            if is_new and len(self._bad) >= max_bad:
                raise error
            self._bad.add(sample)
            count = len(self._bad)
        if is_new:
            message = "rank %d: bad sample, %d of max_bad=%d; its slot is black and not valid: %s"
            logger.warning(message, self.options.rank, count, max_bad, error)
        self.delivery.put_nothing(slots, slot)
        slots.valid[slot] = False
