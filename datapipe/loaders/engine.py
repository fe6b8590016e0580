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
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import DatapipeError, DecodeError
from ..watched import wait_for
from .base import DataDescription, Loader, Place
from .batch import Batch
from .batch_slots import BatchSlots, ChunkReport, SlotsT
from .decoder import Decoder
from .epoch_plan import STEPS_TO_PLAN, EpochPart, LastPlan
from .image_chunk import ImageChunk
from .options import LoaderOptions
from .threads import Pool, Threads

logger = logging.getLogger(__name__)

AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read

_R = TypeVar("_R")


class SampleSource(ABC):
    """Where the bytes of an epoch's samples come from.

    Attributes:
        num_readers: Threads that read ahead.
    """

    num_readers = 1

    @abstractmethod
    def plan_epoch(self, engine: Engine[SlotsT], part: EpochPart) -> Any:
        """In a thread: return what `batches` needs before the first batch, such as the order of all samples."""

    @abstractmethod
    def batches(self, engine: Engine[SlotsT], part: EpochPart, plan: Any) -> Generator[SlotsT]:
        """Start work on a batch whenever the generator is asked for the next.

        Args:
            engine: Engine that fills slots.
            part: Part of an epoch.
            plan: Result of `plan_epoch` for this part.

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
        self._last_plan = LastPlan()
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
        delivery, is_training = self.delivery, self.options.train
        part = EpochPart(epoch if is_training else 0, self.lanes, steps)  # evaluations are alike
        started = self.source.batches(self, part, self.wait_for(self._plan(part)))
        being_filled: deque[SlotsT] = deque()
        begun: deque[SlotsT] = deque()
        try:
            while True:
                while len(being_filled) < AHEAD and (slots := next(started, None)) is not None:
                    being_filled.append(slots)
                if len(self) - self._step <= STEPS_TO_PLAN:
                    self._plan(EpochPart(part.epoch + is_training, self.lanes, range(len(self))))
                # Never wait for a batch to be read while the device has one.
                while being_filled and len(begun) <= delivery.num_on_device and (not begun or being_filled[0].is_full):
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

    def _plan(self, part: EpochPart) -> Future[Any]:
        return self._last_plan.get(part, partial(self.threads.read.submit, self.source.plan_epoch, self))

    @property
    def threads(self) -> Threads:
        """The threads of this loader, which are begun when they are first needed."""
        if self._threads is None:
            count = self.decoder.count_threads(self.options)
            self._threads = Threads(Pool(count), Pool(self.source.num_readers), Pool(1))
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
            self._process, self._threads, self._last_plan = os.getpid(), None, LastPlan()
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
