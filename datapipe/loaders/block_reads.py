"""Contiguous reads of many samples, each read once and shortly before it is needed, for the order "blocks"."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from ..dataset.block_slots import BlockSlots
from ..dataset.shard_files import Data
from ..dataset.shard_reader import ShardReader
from ..errors import ShardReadError
from ..sampling.block_order import BlockOrder, Needs
from ..sampling.cached_blocks import NextUses, choose_slot
from .batch_memory import BatchMemory
from .coalesced_reads import Extent
from .threads import Pool

READ_AHEAD = 8  # reads, beyond those that the batches under way need: for the times when many lanes begin one at once


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
    """A rank's part of a block: neighbouring samples that are read at once.

    Args:
        source: What it is read with.
        samples: int64[N], in the order of the file.
        last_step: The step that may need one of them last.
        cached: Where else the block may be.
    """

    def __init__(
        self, source: ReadFrom, samples: np.ndarray, last_step: int, cached: CachedBlock | None = None
    ) -> None:
        self.last_step, self._cached = last_step, cached
        self._source, self._samples = source, samples
        self._start = 0  # of its bytes in the shard
        self._left = len(samples)  # not asked for yet; some of them other ranks may ask for
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

    def _read(self) -> tuple[int, Data]:
        """Return the bytes, and where they begin in the shard: those of the whole block, if the node's disk has it."""
        reader, index, block_bytes, memory = self._source
        into = memory.take().data
        shard, start, stop = _find_extent(index[self._samples])
        if self._cached is None:
            return reader.read_block(shard, start, stop, block_bytes, into)
        _, block_start, block_stop = _find_extent(index[self._cached.samples])
        data: Data | None = self._cached.read(block_stop - block_start, into)
        if data is not None:
            return block_start, data
        data = reader.read(shard, start, stop - start, into)
        if (start, stop) == (block_start, block_stop):
            self._cached.keep(data)
        return start, data

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


def _find_extent(records: np.ndarray) -> tuple[int, int, int]:
    """Return the shard of neighbouring samples, the first of their bytes in it, and the byte behind the last."""
    starts = records["offset"].astype(np.int64)
    return int(records["shard"][0]), int(starts.min()), int((starts + records["size"]).max())


class BlockedReads:
    """The reads of a chunk of samples, each a part of the block that was read with it."""

    def __init__(self, reads: Sequence[BlockRead], extents: Sequence[Extent]) -> None:
        self._reads, self._extents = reads, extents

    def read(self, i: int) -> memoryview:
        """Return the bytes of the chunk's `i`-th sample, not checked. Raises ShardReadError."""
        _, _, offset, size, _ = self._extents[i]
        return self._reads[i].take(offset, size)


class RankReads:
    """The blocks that one rank reads in one epoch, each in memory from shortly before its first sample's turn to its
    last's.

    Args:
        source: What they are read with.
        order: Of the epoch.
        needs: `order`'s, of this rank.
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
        self._reads: dict[int, BlockRead] = {}  # by their number: those begun, while they may still be needed
        self._num_begun = 0
        self._futures: list[Future[Data | ShardReadError | None]] = []

    def begin(self, step: int, numbers: list[int]) -> list[BlockRead]:
        """Begin to read what a step needs, and a few blocks more.

        Args:
            step: Of the epoch; steps come in order.
            numbers: For each sample of the batch, the number of the read that it is part of.

        Returns:
            The reads with these numbers.
        """
        stop = int(np.searchsorted(self._needs.first, step, "right")) + READ_AHEAD
        self._futures = [future for future in self._futures if not future.done()]
        columns = (column[self._num_begun : stop].tolist() for column in (self._needs.runs, self._needs.last))
        for number, last_step in zip(*columns, strict=True):
            samples, cached = self._order.samples_of(number), self._find_cached(number)
            read = self._reads[number] = BlockRead(self._source, samples, last_step, cached)
            self._futures.append(self._readers.submit(read.load))
        self._num_begun = max(self._num_begun, stop)
        reads = [self._reads[number] for number in numbers]
        self._reads = {number: read for number, read in self._reads.items() if read.last_step > step}
        return reads

    def _find_cached(self, number: int) -> CachedBlock | None:
        return CachedBlock(*self._cache, *self._order.block_of(number)) if self._cache else None

    def end(self) -> None:
        """Read nothing more ahead."""
        for future in self._futures:
            future.cancel()
