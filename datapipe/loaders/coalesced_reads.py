"""Reading the samples of a chunk, neighbours in a shard at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..dataset.shard_files import Data
from ..dataset.shard_reader import ShardReader

GAP_BYTES = 4096  # between two neighbours that are read at once: copying it takes less than another call


class Extent(NamedTuple):
    """Where a sample's bytes lie, as the index says it."""

    sample: int
    shard: int
    offset: int  # bytes
    size: int  # bytes
    checksum: int


class CoalescedReads:
    """The reads of a chunk of samples, to be asked for in order."""

    def __init__(self, reader: ShardReader, extents: Sequence[Extent]) -> None:
        self._reader, self._extents = reader, extents
        self._groups = [group for group in group_neighbours(extents) for _ in group]  # of each sample
        self._group = range(0)  # that was read last: its first byte and its bytes are
        self._start, self._bytes = 0, memoryview(b"")

    def read(self, i: int) -> Data:
        """Return the bytes of the chunk's `i`-th sample, not checked. Raises ShardReadError."""
        group = self._groups[i]
        _, shard, offset, size, _ = self._extents[i]
        if len(group) == 1:
            return self._reader.read(shard, offset, size)
        if group is not self._group:
            start, last = self._extents[group.start].offset, self._extents[group.stop - 1]
            self._bytes = memoryview(self._reader.read(shard, start, last.offset + last.size - start))
            self._group, self._start = group, start
        return self._bytes[offset - self._start : offset - self._start + size]


def group_neighbours(extents: Sequence[Extent]) -> list[range]:
    """Divide samples into groups that are read at once: in one shard, one behind the other without large gaps.

    >>> group_neighbours([Extent(7, 0, 0, 100, 0), Extent(8, 0, 512, 100, 0), Extent(3, 1, 1024, 100, 0)])
    [range(0, 2), range(2, 3)]
    """
    starts = [0] if extents else []
    for i in range(1, len(extents)):
        _, shard, offset, size, _ = extents[i - 1]
        if extents[i].shard != shard or not 0 <= extents[i].offset - (offset + size) <= GAP_BYTES:
            starts.append(i)
    return [range(start, stop) for start, stop in pairwise([*starts, len(extents)])]
