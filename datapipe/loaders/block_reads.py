"""Contiguous reads of many samples, each read once and shortly before it is needed, for the order "blocks"."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..dataset.block_slots import BlockSlots
from ..dataset.shard_files import Data
from ..dataset.shard_reader import ShardReader
from ..errors import ShardReadError
from ..sampling.block_order import NEVER, BlockOrder, Needs
from ..sampling.cached_blocks import NextUses, choose_slot
from .batch_memory import BatchMemory
from .threads import Pool

READ_AHEAD = 8  # reads, beyond those that the batches under way need: for the times when many lanes begin one at once
PIECE_BYTES = 1 << 18  # in the first step of an epoch: a few samples, so that not much is read before its turn


class ReadFrom(NamedTuple):
    """What a block is read with."""

    reader: ShardReader
    records: np.ndarray  # the index, RECORD[num_samples]
    block_bytes: int  # of the grid's cells
    memory: BatchMemory  # for any block


class CachedBlock(NamedTuple):
    """A block, which the node's disk may hold, or is to hold from now on."""

    slots: BlockSlots
    uses: NextUses  # of this node, in this epoch
    block: int  # its number
    samples: np.ndarray  # int64[N], all of the block's, in the order of the file

    def read(self, size: int, into: memoryview) -> memoryview | None:
        """Read the block from the node's disk, if it is there: `size` bytes."""
        return self.slots.read(self.block, size, into)

    def keep(self, data: Data) -> None:
        """Keep the block's bytes, unless others are needed sooner."""
        self.slots.keep(self.block, memoryview(data), partial(choose_slot, self.uses, self.block))


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


def read_whole(source: ReadFrom, samples: np.ndarray, cached: CachedBlock | None) -> tuple[int, Data]:
    """Read neighbouring samples of a block, or the whole block if the node's disk has it.

    Args:
        source: Reader, index and memory with which they are read.
        samples: Numbers of the samples, int64[N], in the order of the file.
        cached: The block on the node's disk, which may hold it; None: the node's disk keeps no blocks.

    Returns:
        The place in the shard where the bytes begin, and the bytes.

    Raises:
        ShardReadError: They cannot be read.
    """
    reader, index, block_bytes, memory = source
    into = memory.take().data
    shard, start, stop = _find_extent(index[samples])
    if cached is None:
        start, stop = reader.extent_to_read(shard, start, stop, block_bytes)
        data = reader.read(shard, start, stop - start, into)
        reader.keep_block(shard, start, [data], block_bytes)
        return start, data
    _, block_start, block_stop = _find_extent(index[cached.samples])
    kept = cached.read(block_stop - block_start, into)
    if kept is not None:
        return block_start, kept
    data = reader.read(shard, start, stop - start, into)
    if (start, stop) == (block_start, block_stop):
        cached.keep(data)
    return start, data


class PiecewiseRead:
    """Neighbouring samples of a block that are read in pieces, each when its turn comes.

    Args:
        source: Reader, index and memory with which they are read.
        samples: Numbers of the samples, int64[N], in the order of the file.

    Attributes:
        firsts: Place in `samples` of the first sample of each piece, int64[pieces].
        pieces: One BlockRead per piece.
    """

    def __init__(self, source: ReadFrom, samples: np.ndarray) -> None:
        self._source, records = source, source.records[samples]
        offsets = records["offset"].astype(np.int64)
        self._shard, self._start, self._stop = _find_extent(records)
        cells = (offsets - self._start) // PIECE_BYTES
        self.firsts = np.flatnonzero(np.diff(cells, prepend=-1))
        self._bounds: list[int] = offsets[self.firsts[1:]].tolist()  # where all pieces but the first begin
        counts = np.diff(self.firsts, append=len(samples)).tolist()
        self.pieces = [BlockRead(partial(self._read, number), count) for number, count in enumerate(counts)]
        self._parts: list[Data | None] = [None] * len(counts)
        self._extent: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def _read(self, number: int) -> tuple[int, Data]:
        reader, _, block_bytes, _ = self._source
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


class RankReads:
    """The blocks that one rank reads in one epoch, each in memory from shortly before its first sample's turn to its
    last's.

    Args:
        source: Reader, index and memory with which they are read.
        order: Order of the epoch.
        needs: Needs of this rank, from `order`.
        readers: The threads that read ahead.
        cache: Blocks on the node's disk, and when it needs them next.
    """

    def __init__(
        self,
        source: ReadFrom,
        order: BlockOrder,
        needs: Needs,
        readers: Pool,
        cache: tuple[BlockSlots, NextUses] | None = None,
    ) -> None:
        self._cache = cache
        self._source, self._order, self._needs, self._readers = source, order, needs, readers
        self._reads: dict[int, BlockRead | PiecewiseRead] = {}  # by their number: those begun, until their last step
        self._last_steps: dict[int, int] = {}
        self._num_begun = 0
        self._futures: list[Future[Data | ShardReadError | None]] = []

    def begin(self, step: int, numbers: list[int]) -> list[BlockRead | PiecewiseRead]:
        """Begin to read what a step needs, and a few blocks more.

        The first step needs a block of each lane. It would wait for all of their bytes, so these are read in pieces,
        those first that are needed first.

        Args:
            step: Number of the step in the epoch; steps come in order.
            numbers: Number of the read that each sample of the batch is part of.

        Returns:
            The reads with these numbers.
        """
        needs, is_first = self._needs, not self._num_begun
        stop = int(np.searchsorted(needs.first, step, "right")) + READ_AHEAD
        columns = (column[self._num_begun : stop].tolist() for column in needs)
        turns: list[tuple[int, BlockRead]] = []
        for number, first_step, last_step in zip(*columns, strict=True):
            samples = self._order.samples_of(number)
            if is_first and first_step <= step and self._cache is None:
                pieces = self._reads[number] = PiecewiseRead(self._source, samples)
                steps = self._order.steps_of(number)
                first_steps = np.minimum.reduceat(np.where(steps < step, NEVER, steps), pieces.firsts)
                turns += zip(first_steps.tolist(), pieces.pieces, strict=True)
            else:
                cached = CachedBlock(*self._cache, *self._order.block_of(number)) if self._cache else None
                read = self._reads[number] = BlockRead(partial(read_whole, self._source, samples, cached), len(samples))
                turns.append((first_step, read))
            self._last_steps[number] = last_step
        self._futures = [future for future in self._futures if not future.done()]
        self._futures += [self._readers.submit(read.load) for _, read in sorted(turns, key=itemgetter(0))]
        self._num_begun = max(self._num_begun, stop)
        reads = [self._reads[number] for number in numbers]
        for number in [number for number, last_step in self._last_steps.items() if last_step <= step]:
            del self._reads[number], self._last_steps[number]
        return reads

    def end(self) -> None:
        """Read nothing more ahead."""
        for future in self._futures:
            future.cancel()
