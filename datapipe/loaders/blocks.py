"""Samples of a packed data set in the order "blocks": contiguous reads of many samples, each byte read once per epoch,
and shortly before it is needed."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from ..dataset import DataSet
from ..dataset.block_slots import BlockSlots
from ..dataset.shard_files import Data, room_for
from ..dataset.shard_reader import SLACK, ShardReader
from ..errors import ShardReadError
from ..sampling.block_order import NEVER, BlockOrder, Needs, grid, longest
from ..sampling.cached_blocks import HORIZON, NextUses, choose_slot
from .batch_slots import BatchMemory, SlotsT
from .engine import Engine
from .epoch_plan import EpochPart
from .image_chunk import BlockedChunk, ImageChunk
from .indexed import IndexedSource
from .options import LoaderOptions
from .threads import Pool

_READERS = 4  # threads that read blocks ahead: the others continue while the filesystem answers one
_READ_AHEAD = 8  # reads, beyond those that the batches under way need: for the times when many lanes begin one at once
PIECE_BYTES = 1 << 18  # in the first step of an epoch: a few samples, so that not much is read before its turn


class BlockSource(IndexedSource):
    """The samples of a packed data set in the order "blocks". See `IndexedSource`."""

    num_readers = _READERS

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        super().__init__(data_set, options)
        self._turns: dict[int, np.ndarray] = {}  # by epoch: `BlockOrder.turns` of this node
        self._block_bytes = options.block_mib << 20
        self._grid = grid(data_set.index, self._block_bytes)
        more = self._block_bytes // SLACK if data_set.local else 0
        room = room_for(longest(data_set.index, self._grid) + more)
        self._memory = BatchMemory((room,), pinned=False)

    def plan_epoch(self, engine: Engine[SlotsT], part: EpochPart) -> Any:
        epoch, lanes, steps = part
        order, kept = self._order(epoch, lanes), self.data_set.slots
        needs = order.needs(self.options.rank, self.options.world_size, steps)
        return order, needs, (kept, self._next_uses(kept.num_slots, epoch, lanes)) if kept else None

    def batches(self, engine: Engine[SlotsT], part: EpochPart, plan: Any) -> Generator[SlotsT]:
        order, needs, cache = plan
        reads = RankReads(self.data_set, self._block_bytes, self._memory, order, needs, engine.threads.read, cache)
        try:
            for step in part.steps:
                positions = engine.positions(step)
                samples, numbers = order.at(positions[positions < len(order)])
                slots = self.start(engine, part.epoch, positions, samples)
                slots.known = slots.known, reads.begin(step, numbers.tolist())
                engine.fill(slots)
                yield slots
        finally:
            reads.end()

    def images(self, engine: Engine[SlotsT], slots: SlotsT, chunk: slice) -> ImageChunk:
        plan, takers = slots.known
        return BlockedChunk(plan.result(), chunk, self.data_set, takers)

    def _order(self, epoch: int, lanes: int) -> BlockOrder:
        options = self.options
        return BlockOrder(self._grid, options.global_batch_size, options.last_batch, lanes, options.seed, epoch)

    def _next_uses(self, num_slots: int, epoch: int, lanes: int) -> NextUses:
        ranks, world_size = self.options.ranks_of_node(), self.options.world_size
        epochs_held = num_slots / (len(self._grid.starts) - 1) * world_size / len(ranks)
        for number in range(epoch, epoch + min(math.ceil(epochs_held) + 1, HORIZON) + 1):
            if number not in self._turns:
                self._turns[number] = self._order(number, lanes).turns(ranks, world_size)
        self._turns = {number: turns for number, turns in self._turns.items() if number >= epoch}
        return NextUses(self._turns.__getitem__, epoch, math.ceil(epochs_held) + 1)


class RankReads:
    """The blocks that one rank reads in one epoch, each in memory from shortly before its first sample's turn to its
    last's.

    Args:
        data_set: The data set.
        block_bytes: Size of the cells in which the samples of a block begin, in bytes.
        memory: Memory for any block.
        order: Order of the epoch.
        needs: Needs of this rank, from `order`.
        readers: The threads that read ahead.
        cache: Blocks on the node's disk, and when it needs them next.
    """

    def __init__(
        self,
        data_set: DataSet,
        block_bytes: int,
        memory: BatchMemory,
        order: BlockOrder,
        needs: Needs,
        readers: Pool,
        cache: tuple[BlockSlots, NextUses] | None,
    ) -> None:
        self._reader, self._index = data_set.reader, data_set.index
        self._block_bytes, self._memory = block_bytes, memory
        self._order, self._needs, self._readers, self._cache = order, needs, readers, cache
        self._reads: dict[int, BlockRead | PiecewiseRead] = {}  # by their number: those begun, until their last step
        self._last_steps: dict[int, int] = {}
        self._num_begun = 0
        self._futures: list[Future[Data | ShardReadError | None]] = []

    def begin(self, step: int, numbers: list[int]) -> Sequence[Callable[[int, int], memoryview]]:
        """Begin to read what a step needs, and a few blocks more.

        The first step needs a block of each lane. It would wait for all of their bytes, so these are read in pieces,
        those first that are needed first.

        Args:
            step: Number of the step in the epoch; steps come in order.
            numbers: Number of the read that each sample of the batch is part of.

        Returns:
            A function for each sample of the batch, which takes its bytes from the read.
        """
        needs, is_first = self._needs, not self._num_begun
        stop = int(np.searchsorted(needs.first, step, "right")) + _READ_AHEAD
        columns = (column[self._num_begun : stop].tolist() for column in needs)
        turns: list[tuple[int, BlockRead]] = []
        for number, first_step, last_step in zip(*columns, strict=True):
            samples = self._order.samples_of(number)
            if is_first and first_step <= step and self._cache is None:
                pieces = self._reads[number] = PiecewiseRead(self._reader, self._index[samples], self._block_bytes)
                steps = self._order.steps_of(number)
                first_steps = np.minimum.reduceat(np.where(steps < step, NEVER, steps), pieces.firsts)
                turns += zip(first_steps.tolist(), pieces.pieces, strict=True)
            else:
                read = self._reads[number] = BlockRead(partial(self._read_run, number, samples), len(samples))
                turns.append((first_step, read))
            self._last_steps[number] = last_step
        self._futures = [future for future in self._futures if not future.done()]
        self._futures += [self._readers.submit(read.load) for _, read in sorted(turns, key=itemgetter(0))]
        self._num_begun = max(self._num_begun, stop)
        takers = [self._reads[number].take for number in numbers]
        for number in [number for number, last_step in self._last_steps.items() if last_step <= step]:
            del self._reads[number], self._last_steps[number]
        return takers

    def end(self) -> None:
        """Read nothing more ahead."""
        for future in self._futures:
            future.cancel()
        self._reads.clear()  # which refer to this object, as it does to them

    def _read_run(self, number: int, samples: np.ndarray) -> tuple[int, Data]:
        """In a thread: read a run, or the whole block if the node's disk has it.

        Returns the place in the shard where the bytes begin, and the bytes. Raises ShardReadError.
        """
        reader, into = self._reader, self._memory.take().data
        shard, start, stop = _find_extent(self._index[samples])
        if self._cache is None:
            start, stop = reader.extent_to_read(shard, start, stop, self._block_bytes)
            data = reader.read(shard, start, stop - start, into)
            reader.keep_block(shard, start, [data], self._block_bytes)
            return start, data
        slots, uses = self._cache
        block, samples_of_block = self._order.block_of(number)
        _, block_start, block_stop = _find_extent(self._index[samples_of_block])
        kept = slots.read(block, block_stop - block_start, into)
        if kept is not None:
            return block_start, kept
        data = reader.read(shard, start, stop - start, into)
        if (start, stop) == (block_start, block_stop):
            slots.keep(block, memoryview(data), partial(choose_slot, uses, block))
        return start, data


class BlockRead:
    """Neighbouring samples of a block that are read at once.

    Args:
        read: Function that returns where in the shard the bytes begin, and the bytes. Raises ShardReadError.
        num_samples: Number of the samples; each is asked for once, by this rank or another.
    """

    def __init__(self, read: Callable[[], tuple[int, Data]], num_samples: int) -> None:
        self._read, self._left = read, num_samples
        self._start = 0  # of its bytes in the shard
        self._data: Data | ShardReadError | None = None
        self._lock = threading.Lock()

    def load(self) -> Data | ShardReadError | None:
        """Read the bytes unless that was done; whoever comes meanwhile waits."""
        with self._lock:
            if self._data is None and self._left:
                try:
                    self._start, self._data = self._read()
                except ShardReadError as error:  # raised where the first sample is asked for
                    self._data = error
            return self._data

    def take(self, offset: int, size: int) -> memoryview:
        """Return the bytes of one sample, which is asked for once. Raises ShardReadError."""
        data = self.load()
        if isinstance(data, ShardReadError):
            raise data
        if data is None:
            raise ValueError(f"the {size} bytes at {offset} were asked for twice")
        with self._lock:
            self._left -= 1
            if not self._left:
                self._data = None
        return memoryview(data)[offset - self._start : offset - self._start + size]


class PiecewiseRead:
    """Neighbouring samples of a block that are read in pieces, each when its turn comes.

    Args:
        reader: Reader of the shards.
        records: Records of the samples, RECORD[N], in the order of the file.
        block_bytes: Size of the cells in which the samples of a block begin, in bytes.

    Attributes:
        firsts: Place in `records` of the first sample of each piece, int64[pieces].
        pieces: One BlockRead per piece.
    """

    def __init__(self, reader: ShardReader, records: np.ndarray, block_bytes: int) -> None:
        self._reader, self._block_bytes = reader, block_bytes
        offsets = records["offset"].astype(np.int64)
        self._shard, self._start, self._stop = _find_extent(records)
        cells = (offsets - self._start) // PIECE_BYTES
        self.firsts = np.flatnonzero(np.diff(cells, prepend=-1))
        self._bounds: list[int] = offsets[self.firsts[1:]].tolist()  # where all pieces but the first begin
        counts = np.diff(self.firsts, append=len(records)).tolist()
        self.pieces = [BlockRead(partial(self._read, number), count) for number, count in enumerate(counts)]
        self._parts: list[Data | None] = [None] * len(counts)
        self._extent: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def _read(self, number: int) -> tuple[int, Data]:
        reader, block_bytes = self._reader, self._block_bytes
        with self._lock:
            if self._extent is None:
                self._extent = reader.extent_to_read(self._shard, self._start, self._stop, block_bytes)
        start, stop = self._extent
        begin, end = [start, *self._bounds, stop][number : number + 2]
        data = reader.read(self._shard, begin, end - begin)
        with self._lock:
            self._parts[number] = data
            parts = [part for part in self._parts if part is not None]
            is_whole = len(parts) == len(self._parts)
        if is_whole:
            reader.keep_block(self._shard, start, parts, block_bytes)
            self._parts = []
        return begin, data

    def take(self, offset: int, size: int) -> memoryview:
        """Return the bytes of one sample, which is asked for once. Raises ShardReadError."""
        return self.pieces[bisect_right(self._bounds, offset)].take(offset, size)


def _find_extent(records: np.ndarray) -> tuple[int, int, int]:
    """Return the shard of neighbouring samples, the first of their bytes in it, and the byte behind the last."""
    starts = records["offset"].astype(np.int64)
    return int(records["shard"][0]), int(starts.min()), int((starts + records["size"]).max())
