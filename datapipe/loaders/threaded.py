"""Batches filled by threads: the way from positions to images that all backends with our own reader share.

A batch is cut into chunks; a thread fills the slots of one chunk at a time, and works out the chunk's samples and
windows itself, since they are pure functions of its positions. Readers and decoders release the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from ..dataset import DataSet
from ..dataset.shard_reader import Data, room_for
from ..errors import DatapipeError, DecodeError, ShardCorruptError, ShardReadError
from ..images.window import Box
from ..sampling.augment import scales
from ..sampling.block_order import BlockOrder, grid, longest
from ..sampling.order import KeyedPermutation, slice_positions
from .base import Batch, Budget, Loader, LoaderOptions, Split
from .batch_memory import BatchMemory
from .block_reads import Run, Runs
from .threads import Pool, wait_for

logger = logging.getLogger(__name__)

CHUNK = 32  # samples: small enough to share a batch among threads, large enough for numpy's overhead
READERS = 2  # threads that read runs ahead, in blocks: one can go on while the other's filesystem answers
AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read
SLOW_SHARE = 0.25  # of the threads' time; from the page cache it is a few hundredths
GAP_BYTES = 4096  # between two neighbours that are read at once: copying it takes less than another call


Order = np.ndarray | KeyedPermutation | BlockOrder


class Slots:
    """A batch being filled: slot `i` is for `samples[i]`, at `positions[i]`; the rest, behind them, is padding."""

    runs: list[Run] | None = None  # in blocks: that each sample is read with

    def __init__(self, positions: np.ndarray, samples: np.ndarray) -> None:
        self.positions = positions
        self.valid = np.arange(len(positions)) < len(samples)
        self.samples = np.full(len(positions), -1, np.int64)
        self.samples[: len(samples)] = samples
        self.labels = np.zeros(len(positions), np.int64)
        self.abandoned = False
        self.lock, self.planned = threading.Lock(), None


class Planned(NamedTuple):
    """Of each valid slot of a batch, in order."""

    fields: list[tuple[int, int, int, int, int]]  # sample, shard, offset, size, checksum
    sizes: list[tuple[int, int]]  # width and height
    boxes: list[Box]
    scales: list[int]
    flips: list[bool]


class Done(NamedTuple):
    """What a task in a thread took."""

    stages: dict[str, float]  # seconds
    read_bytes: int  # of samples


class Wanted(NamedTuple):
    """An image on its way into a slot."""

    slot: int
    sample: int
    data: Data  # encoded
    size: tuple[int, int]  # width and height in pixels, for which `box` was drawn
    box: Box
    scale: int  # see `augment.scales`
    flip: bool


class FillingLoader(Loader):
    """See `open_loader`. `stage_s`: seconds that the threads spent in each stage."""

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        super().__init__(Split.of(data_set), options)
        self.data_set = data_set
        self.stage_s: Counter[str] = Counter()
        self.read_bytes = 0
        self._pool: Pool | None = None
        self._readers: Pool | None = None  # that read ahead: runs, or else only tell the kernel to
        self._hints: list[Future] = []
        self._process = os.getpid()
        self._budget = Budget(options.max_bad, options.rank)
        if self._in_blocks():
            self._grid = grid(data_set.index, options.block_mib << 20)
            self._run_memory = BatchMemory((room_for(longest(data_set.index, self._grid)),), pinned=False)

    def close(self) -> None:
        super().close()
        self.data_set.reader.close()  # first: a thread may pause there for long before it reads again
        self._end_pool()
        self.data_set.close()

    def stages(self) -> dict[str, float]:
        """Seconds in all: of the threads in each stage, idle since the queue was full, and of the consumer, waiting."""
        idle_s = self._pool.idle_s() if self._pool else 0.0
        return {**self.stage_s, "queue_full": idle_s, "queue_empty": self.wait_s}

    # --- for the backends ---

    @abstractmethod
    def _new_slots(self, positions: np.ndarray, samples: np.ndarray) -> Slots:
        """Slots for one batch, with what the backend needs."""

    @abstractmethod
    def _put(self, slots: Slots, wanted: list[Wanted]) -> dict[str, float]:
        """In a thread: put images into their slots; return the seconds of each stage.

        Calls `_take_bad` for what cannot be decoded.
        """

    @abstractmethod
    def _put_nothing(self, slots: Slots, slot: int | slice) -> None:
        """In a thread: these slots stay empty."""

    begun_ahead = 0  # batches that a device works on while the consumer has one

    def _begin(self, slots: Slots) -> None:
        """In the consumer: all slots are filled, and work on a device may begin."""

    @abstractmethod
    def _finish(self, slots: Slots) -> Batch:
        """In the consumer, for each batch that was begun, in order: wait for it."""

    def _drain(self, begun: Collection[Slots]) -> None:
        """The iteration has ended, with these batches begun and not finished: wait for what a device does."""

    # --- in the consumer ---

    def _in_blocks(self) -> bool:
        return self.options.order == "blocks" and self.options.train

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        self._begin_in_this_process()
        order, runs = self._plan(epoch, steps)
        under_way: deque[tuple[Slots, list[Future]]] = deque()
        begun: deque[Slots] = deque()
        upcoming = iter(steps)
        try:
            while True:
                while len(under_way) < AHEAD and (step := next(upcoming, None)) is not None:
                    under_way.append(self._start(epoch, step, order, runs))
                while under_way and len(begun) <= self.begun_ahead:
                    for future in under_way[0][1]:
                        self._count(wait_for(future, self.options.timeout_s, self._tell))
                    begun.append(under_way.popleft()[0])
                    self._begin(begun[-1])
                if not begun:
                    return
                yield self._finish(begun.popleft())
        finally:
            for slots, futures in under_way:
                slots.abandoned = True  # a thread stops after its sample; its memory stays as long as it holds it
                for future in futures:
                    future.cancel()
            if runs is not None:
                runs.end()
            self._drain(begun)

    def _begin_in_this_process(self) -> None:
        """Threads do not survive a fork, and files are better not shared over it."""
        if self._process != os.getpid():
            self._pool = self._readers = None
            self._hints = []
            self._process = os.getpid()
            self.data_set.reader.close()
        if self._pool is None:
            self._pool = Pool(self.options.num_threads())
            self._readers = Pool(READERS if self._in_blocks() else 1)

    def _end_pool(self) -> None:
        if self._pool is not None and self._process == os.getpid():
            self.stage_s["queue_full"] += self._pool.idle_s()
            self._pool.close()
            self._readers.close()
        self._pool = self._readers = None

    def _plan(self, epoch: int, steps: range) -> tuple[Order, Runs | None]:
        """The order of the epoch, and in blocks what this rank reads in these steps."""
        if not self._in_blocks():
            return self._samples(epoch), None
        options = self.options
        order = BlockOrder(self._grid, options.global_batch_size, options.last, self.lanes, options.seed, epoch)
        needs = order.needs(options.rank, options.world_size, steps)
        return order, Runs(self.data_set, order, needs, self._run_memory, self._readers)

    def _start(self, epoch: int, step: int, order: Order, runs: Runs | None) -> tuple[Slots, list[Future]]:
        options = self.options
        positions = slice_positions(step, options.batch_size, options.rank, options.world_size)
        inside = positions[positions < len(order)]
        if runs is None:
            slots = self._new_slots(positions, order[inside])
            if self._reads_slowly():
                self._hints = [hint for hint in self._hints if not hint.done()]
                if len(self._hints) < AHEAD:  # a hint that comes too late is of no use, and would keep a batch's memory
                    self._hints.append(self._readers.submit(self._hint, epoch, slots))
        else:
            samples, numbers = order.at(inside)
            slots = self._new_slots(positions, samples)
            slots.runs = runs.begin(step, numbers.tolist())
        chunks = (slice(i, i + CHUNK) for i in range(0, options.batch_size, CHUNK))
        return slots, [self._pool.submit(self._fill, epoch, slots, chunk, runs) for chunk in chunks]

    def _reads_slowly(self) -> bool:
        """Do reads take so long that hints to the kernel, two batches ahead, are worth their calls?"""
        return self.stage_s["read"] > SLOW_SHARE * self.stage_s.total()

    def _count(self, found: Done | None) -> None:
        if found:
            self.stage_s.update(found.stages)
            self.read_bytes += found.read_bytes

    def _tell(self, waited_s: float, is_over: bool) -> None:
        read = self.data_set.reader.oldest()
        what = f"waiting for a batch for {waited_s:.0f} s"
        if read is not None and read.problem:
            what += f"; {read.problem}; it is being tried again"
        elif read is not None:
            what += f"; a read at {read.offset} has not answered for {time.monotonic() - read.since:.0f} s"
        path, shard = (read.path.parent, read.path.name) if read else (self.data_set.folder, None)
        if is_over:
            raise DatapipeError(f"{what} (timeout_s={self.options.timeout_s:g})", path=path, shard=shard)
        logger.warning("rank %d: %s, shard %s: %s", self.options.rank, path, shard, what)

    # --- in the threads ---

    def _fill(self, epoch: int, slots: Slots, chunk: slice, runs: Runs | None) -> Done | None:
        """Fill the slots of a chunk."""
        clock, began = time.perf_counter, time.perf_counter()
        fields, sizes, boxes, scale, flips = (column[chunk] for column in self._planned_once(epoch, slots))
        first, count = chunk.start, len(fields)
        if count < chunk.stop - first:  # padding lies behind the last position
            self._put_nothing(slots, slice(first + count, min(chunk.stop, len(slots.valid))))
        read = self._reads(fields) if runs is None else self._reads_of(runs, slots.runs[chunk])
        started, wanted = clock(), []
        for i, record in enumerate(fields):
            if slots.abandoned:
                return None
            try:
                data = read(i, record)
                wanted.append(Wanted(first + i, record[0], data, sizes[i], boxes[i], scale[i], flips[i]))
            except ShardReadError as error:  # a failing filesystem is no bad sample
                error.key = error.key or self.data_set.key(record[0])
                raise
            except ShardCorruptError as error:
                self._take_bad(slots, first + i, error)
        stages = {"read": clock() - started, **self._put(slots, wanted)}
        stages["other"] = clock() - began - sum(stages.values())
        return Done(stages, sum(record[3] for record in fields))

    def _hint(self, epoch: int, slots: Slots) -> None:
        """Tell the kernel what will be read. It may ask the filesystem's server first, and so must not be asked by the
        consumer.
        """
        for _, shard, offset, size, _ in self._planned_once(epoch, slots).fields:
            if slots.abandoned:
                return
            self.data_set.reader.will_read(shard, offset, size)

    def _planned_once(self, epoch: int, slots: Slots) -> Planned:
        with slots.lock:  # by the first thread for all: numpy takes as long for 256 samples as for 32
            if slots.planned is None:
                slots.planned = self._planned(epoch, slots)
            return slots.planned

    def _planned(self, epoch: int, slots: Slots) -> Planned:
        count = int(slots.valid.sum())
        if not count:
            return Planned([], [], [], [], [])
        samples, positions = slots.samples[:count], slots.positions[:count]
        records = self.data_set.index[samples]
        slots.labels[:count] = records["label"]
        windows = self._windows(epoch, positions, records["width"], records["height"])
        columns = [samples.tolist(), *(records[name].tolist() for name in ("shard", "offset", "size", "checksum"))]
        return Planned(
            list(zip(*columns, strict=True)),
            list(zip(records["width"].tolist(), records["height"].tolist(), strict=True)),
            windows.boxes.tolist(),
            scales(windows.boxes, self.size).tolist(),
            windows.flips.tolist(),
        )

    def _reads_of(self, runs: Runs, in_runs: list[Run]) -> Callable[[int, tuple], Data]:
        """Like `_reads`, in blocks."""

        def read(i: int, record: tuple) -> Data:
            sample, _, offset, size, checksum = record
            data = runs.take(in_runs[i], offset, size)
            self.data_set.check(sample, data, checksum)
            return data

        return read

    def _reads(self, fields: list[tuple]) -> Callable[[int, tuple], Data]:
        """A function from a sample's number in the chunk and its fields to its bytes, checked."""
        data_set = self.data_set
        spans, held = _spans(fields), {}

        def read_span(i: int, record: tuple) -> Data:
            sample, shard, offset, size, checksum = record
            first = spans[i]
            if first not in held:
                start, stop = fields[first][2], max(j for j in range(len(fields)) if spans[j] == first)
                held[first] = start, memoryview(data_set.reader.read(shard, start, sum(fields[stop][2:4]) - start))
            start, whole = held[first]
            data = whole[offset - start : offset - start + size]
            data_set.check(sample, data, checksum)
            return data

        alone = [spans.count(first) == 1 for first in spans]
        return lambda i, record: data_set.read_at(*record) if alone[i] else read_span(i, record)

    def _take_bad(self, slots: Slots, slot: int, error: Exception) -> None:
        """In a thread: leave a slot empty; or, the budget being spent, raise the error with the sample's place."""
        sample = int(slots.samples[slot])
        if not isinstance(error, DatapipeError):
            shard = self.data_set.manifest.shards[self.data_set.index[sample]["shard"]].name
            error = DecodeError(str(error), path=self.data_set.folder, shard=shard, key=self.data_set.key(sample))
        self._budget.spend(sample, error)
        self._put_nothing(slots, slot)
        slots.valid[slot] = False


def _spans(fields: list[tuple]) -> list[int]:
    """For each sample, the first of the neighbours that it is read together with."""
    first, spans, end = 0, [], None
    for i, (_, shard, offset, size, _) in enumerate(fields):
        if end is None or shard != fields[i - 1][1] or not 0 <= offset - end <= GAP_BYTES:
            first = i
        spans.append(first)
        end = offset + size
    return spans
