"""Loaders of packed data sets: threads read samples by the index, and put them into their slots.

A batch is cut into chunks; a thread fills the slots of one chunk at a time. Samples, crops and flips are pure functions
of positions, which the first of a batch's threads works out. Readers and decoders release the interpreter's lock.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from .. import clock
from ..dataset import DataSet
from ..dataset.shard_files import room_for
from ..dataset.shard_reader import SLACK
from ..errors import SettingError, ShardCorruptError, ShardReadError
from ..images.window import Box
from ..sampling.augment import scales
from ..sampling.block_order import BlockOrder, grid, longest
from ..sampling.cached_blocks import HORIZON, NextUses
from ..sampling.order import KeyedPermutation, epoch_order
from .base import DataDescription, Loader, Place
from .batch_memory import BatchMemory
from .block_reads import BlockedReads, BlockRead, PiecewiseRead, RankReads, ReadFrom
from .coalesced_reads import CoalescedReads, Extent
from .options import LoaderOptions
from .prefetch import AHEAD, CHUNK, ChunkReport, PendingImage, PrefetchLoader, SlotsT, Threads
from .threads import Pool, call_in_time

BLOCK_READERS = 4  # threads that read blocks ahead: the others continue while the filesystem answers one
SLOW_SHARE = 0.25  # of the threads' time; from the page cache it is a few hundredths


LoaderT = TypeVar("LoaderT", bound=Loader)
BlockReads = list[BlockRead | PiecewiseRead]


def open_on(
    path: Path | str, options: LoaderOptions, make: Callable[[DataSet], LoaderT], local: Path | None = None
) -> LoaderT:
    """Open a data set within the time limit, and make a loader of it, which closes it.

    Args:
        path: The data set's folder.
        options: The loader's.
        make: Makes the loader. The data set is closed if that fails.
        local: The folder to which the data set is being copied.

    Returns:
        What `make` returns.

    Raises:
        DatapipeError: The data set cannot be opened, or not within `timeout_s`. And whatever `make` raises.
    """
    data_set = call_in_time(
        options.timeout_s, path, "opening the data set", lambda: DataSet(path, options.io, options.retries, local)
    )
    try:
        return make(data_set)
    except BaseException:
        data_set.close()
        raise


class BatchPlan(NamedTuple):
    """What belongs into each slot that is not padding, in order."""

    extents: list[Extent]
    sizes: list[tuple[int, int]]  # width and height in pixels
    boxes: list[Box]
    scales: list[int]
    flips: list[bool]

    def part(self, slots: slice) -> BatchPlan:
        """Return the plan of some of the slots."""
        extents, sizes, boxes, scale, flips = self
        return BatchPlan(extents[slots], sizes[slots], boxes[slots], scale[slots], flips[slots])


class PlanOnce:
    """A batch's plan, worked out by the first thread that asks: numpy takes as long for 256 samples as for 32."""

    def __init__(self, make: Callable[[], BatchPlan]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._plan: BatchPlan | None = None

    def get(self) -> BatchPlan:
        with self._lock:
            if self._plan is None:
                self._plan = self._make()
            return self._plan


class ThreadedLoader(PrefetchLoader[SlotsT]):
    """A loader of a packed data set, which it closes. See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        super().__init__(DataDescription.from_data_set(data_set), options)
        self.data_set = data_set
        self._hints: list[Future[None]] = []
        self._turns: dict[int, np.ndarray] = {}  # by epoch: `BlockOrder.turns` of this node
        self._in_blocks = options.order == "blocks" and options.train
        slots = data_set.slots
        if slots and options.train and not self._in_blocks:
            message = f"order: {options.order!r} has no use for a part of the data set"
            raise SettingError(f"{message}, which is all that {data_set.local} has room for; allowed: blocks")
        if slots and slots.block_bytes != options.block_mib << 20:
            staged = slots.block_bytes >> 20
            raise SettingError(f"block_mib: {options.block_mib} is not what {data_set.local} was made for: {staged}")
        if self._in_blocks:
            self.num_readers = BLOCK_READERS
            self._block_bytes = options.block_mib << 20
            self._grid = grid(data_set.index, self._block_bytes)
            more = self._block_bytes // SLACK if data_set.local else 0
            room = room_for(longest(data_set.index, self._grid) + more)
            self._block_memory = BatchMemory((room,), pinned=False)

    def close(self) -> None:
        super().close()
        self.data_set.close()

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage; "queue_full" are those that threads were idle since the queue was full."""
        idle_s = self._threads.fill.idle_s() if self._threads else 0.0
        return {**super().stages(), "queue_full": idle_s}

    @abstractmethod
    def _new_slots(self, positions: np.ndarray, count: int) -> SlotsT:
        """In the consumer: make slots for one batch, `count` of them for samples, with what the backend needs."""

    def _place(self, slots: SlotsT, slot: int) -> Place:
        sample, data_set = int(slots.samples[slot]), self.data_set
        shard = data_set.manifest.shards[data_set.index[sample]["shard"]].name
        return {"path": data_set.folder, "shard": shard, "key": data_set.key(sample)}

    def _explain_wait(self) -> tuple[Place, str]:
        read = self.data_set.reader.oldest()
        if read is None:
            return {"path": self.data_set.folder}, ""
        place: Place = {"path": read.path.parent, "shard": read.path.name}
        if read.problem:
            return place, f"; {read.problem}; it is being tried again"
        return place, f"; a read at {read.offset} has not answered for {clock.now() - read.since:.0f} s"

    def _interrupt(self) -> None:
        self.data_set.reader.close()

    def _forget_files(self) -> None:
        self._hints = []
        self.data_set.forget_files()

    # --- in the consumer ---

    def _start_batches(self, epoch: int, steps: range, threads: Threads) -> Generator[SlotsT]:
        if self._in_blocks:
            return self._start_in_blocks(epoch, steps, threads)
        return self._start_in_full_order(epoch, steps, threads)

    def _start_in_full_order(self, epoch: int, steps: range, threads: Threads) -> Generator[SlotsT]:
        order: np.ndarray | KeyedPermutation
        if self.options.train:
            order = epoch_order(self.num_samples, self.options.seed, epoch)
        else:
            order = np.arange(self.num_samples)
        for step in steps:
            positions = self._positions(step)
            slots, plan = self._plan_slots(epoch, positions, order[positions[positions < len(order)]])
            if self._reads_slowly():
                self._hints = [hint for hint in self._hints if not hint.done()]
                if len(self._hints) < AHEAD:  # a hint that comes too late is useless, and would keep a batch's memory
                    self._hints.append(threads.read.submit(self._hint, slots, plan))
            self._start_filling(threads.fill, slots, plan, None)
            yield slots

    def _start_in_blocks(self, epoch: int, steps: range, threads: Threads) -> Generator[SlotsT]:
        options = self.options
        order = self._block_order(epoch)
        needs = order.needs(options.rank, options.world_size, steps)
        kept = self.data_set.slots
        cache = (kept, self._next_uses(kept.num_slots, epoch)) if kept else None
        source = ReadFrom(self.data_set.reader, self.data_set.index, self._block_bytes, self._block_memory)
        reads = RankReads(source, order, needs, threads.read, cache)
        try:
            for step in steps:
                positions = self._positions(step)
                samples, numbers = order.at(positions[positions < len(order)])
                slots, plan = self._plan_slots(epoch, positions, samples)
                self._start_filling(threads.fill, slots, plan, reads.begin(step, numbers.tolist()))
                yield slots
        finally:
            reads.end()

    def _block_order(self, epoch: int) -> BlockOrder:
        options = self.options
        return BlockOrder(self._grid, options.global_batch_size, options.last_batch, self.lanes, options.seed, epoch)

    def _next_uses(self, num_slots: int, epoch: int) -> NextUses:
        ranks, world_size = self.options.ranks_of_node(), self.options.world_size
        epochs_held = num_slots / (len(self._grid.starts) - 1) * world_size / len(ranks)
        for number in range(epoch, epoch + min(math.ceil(epochs_held) + 1, HORIZON) + 1):
            if number not in self._turns:
                self._turns[number] = self._block_order(number).turns(ranks, world_size)
        self._turns = {number: turns for number, turns in self._turns.items() if number >= epoch}
        return NextUses(self._turns.__getitem__, epoch, math.ceil(epochs_held) + 1)

    def _plan_slots(self, epoch: int, positions: np.ndarray, samples: np.ndarray) -> tuple[SlotsT, PlanOnce]:
        slots = self._new_slots(positions, len(samples))
        slots.samples[: len(samples)] = samples
        return slots, PlanOnce(partial(self._plan, epoch, slots))

    def _start_filling(self, pool: Pool, slots: SlotsT, plan: PlanOnce, reads: BlockReads | None) -> None:
        for first in range(0, self.options.batch_size, CHUNK):
            slots.tasks.append(pool.submit(self._fill, slots, slice(first, first + CHUNK), plan, reads))

    def _reads_slowly(self) -> bool:
        """Return whether reads take so long that hints to the kernel, two batches ahead, are worth their calls."""
        return self.stage_s["read"] > SLOW_SHARE * sum(self.stage_s.values())

    # --- in the threads ---

    def _fill(self, slots: SlotsT, chunk: slice, plan: PlanOnce, block_reads: BlockReads | None) -> ChunkReport | None:
        """Fill the slots of a chunk."""
        clock, began = time.perf_counter, time.perf_counter()
        extents, sizes, boxes, scale, flips = plan.get().part(chunk)
        first, count = chunk.start, len(extents)
        if count < chunk.stop - first:  # padding lies behind the last position
            self._put_nothing(slots, slice(first + count, min(chunk.stop, len(slots.valid))))
        reads: CoalescedReads | BlockedReads
        if block_reads is None:
            reads = CoalescedReads(self.data_set.reader, extents)
        else:
            reads = BlockedReads(block_reads[chunk], extents)
        images: list[PendingImage] = []
        reading = clock()
        for i, extent in enumerate(extents):
            if slots.abandoned:
                return None
            try:
                data = self.data_set.checked(extent.sample, reads.read(i), extent.shard, extent.offset, extent.checksum)
                images.append(PendingImage(first + i, extent.sample, data, sizes[i], boxes[i], scale[i], flips[i]))
            except ShardReadError as error:  # a failing filesystem is not a bad sample
                error.key = error.key or self.data_set.key(extent.sample)
                raise
            except ShardCorruptError as error:
                self._take_bad(slots, first + i, error)
        stage_s = {"read": clock() - reading, **self._put(slots, images)}
        stage_s["other"] = clock() - began - sum(stage_s.values())
        return ChunkReport(stage_s, sum(extent.size for extent in extents))

    def _hint(self, slots: SlotsT, plan: PlanOnce) -> None:
        """Tell the kernel what will be read.

        It may ask the filesystem's server first, and so must not be asked by the consumer.
        """
        for _, shard, offset, size, _ in plan.get().extents:
            if slots.abandoned:
                return
            self.data_set.reader.will_read(shard, offset, size)

    def _plan(self, epoch: int, slots: SlotsT) -> BatchPlan:
        count = int(slots.valid.sum())
        if not count:
            return BatchPlan([], [], [], [], [])
        samples, positions = slots.samples[:count], slots.positions[:count]
        records = self.data_set.index[samples]
        slots.labels[:count] = records["label"]
        crops = self._crops(epoch, positions, samples, records["width"], records["height"])
        columns = [samples.tolist(), *(records[name].tolist() for name in ("shard", "offset", "size", "checksum"))]
        return BatchPlan(
            list(map(Extent._make, zip(*columns, strict=True))),
            list(zip(records["width"].tolist(), records["height"].tolist(), strict=True)),
            crops.boxes.tolist(),
            scales(crops.boxes, self.size).tolist(),
            crops.flips.tolist(),
        )
