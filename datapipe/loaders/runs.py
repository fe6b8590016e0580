"""Runs of neighbouring samples, each read at once, for the order "blocks"."""

from __future__ import annotations

import threading

import numpy as np

from ..dataset import DataSet
from ..errors import ShardReadError
from ..reading import Data
from .memory import BatchMemory
from .pool import Pool

READ_AHEAD = 8  # runs, beyond those that the batches under way need: rides out the times when many lanes begin one


class Runs:
    """The runs that one rank needs in one epoch. A run is in memory from shortly before its first sample's turn to its
    last's.

    `runs` and `samples`: int64[N], of each of this rank's positions, in order. `memory` gives room for any run, and
    `readers` read them ahead.
    """

    def __init__(
        self, data_set: DataSet, runs: np.ndarray, samples: np.ndarray, memory: BatchMemory, readers: Pool
    ) -> None:
        self._reader, self._memory, self._readers = data_set.reader, memory, readers
        order = np.argsort(runs, kind="stable")
        runs, records = runs[order], data_set.index[samples[order]]
        starts = np.flatnonzero(np.append(True, runs[1:] != runs[:-1])) if len(runs) else np.empty(0, int)
        ends = records["offset"].astype(np.int64) + records["size"]
        first = np.minimum.reduceat(records["offset"].astype(np.int64), starts) if len(runs) else starts
        stop = np.maximum.reduceat(ends, starts) if len(runs) else starts
        lengths = np.diff(np.append(starts, len(runs)))
        rows = zip(records["shard"][starts].tolist(), first.tolist(), stop.tolist(), lengths.tolist(), strict=True)
        self._runs = {run: _Run(*row) for run, row in zip(runs[starts].tolist(), rows, strict=True)}
        by_need = np.argsort(order[starts])
        self._needed = order[starts][by_need]  # the first position of each run
        self._queue = runs[starts][by_need].tolist()
        self._position, self._begun, self._futures = 0, 0, []

    def begin(self, count: int) -> None:
        """The next `count` positions are about to be taken: read what they need, and a little more."""
        self._position += count
        stop = int(np.searchsorted(self._needed, self._position)) + READ_AHEAD
        self._futures = [future for future in self._futures if not future.done()]
        self._futures += [self._readers.submit(self._load, self._runs[run]) for run in self._queue[self._begun : stop]]
        self._begun = max(self._begun, stop)

    def end(self) -> None:
        """Read nothing more ahead."""
        for future in self._futures:
            future.cancel()

    def take(self, run: int, offset: int, size: int) -> memoryview:
        """The bytes of one sample, which is asked for once. Raises ShardReadError."""
        found = self._runs[run]
        data = self._load(found)
        if isinstance(data, ShardReadError):
            raise data
        with found.lock:
            found.left -= 1
            if not found.left:
                found.data = None
        return memoryview(data)[offset - found.start : offset - found.start + size]

    def _load(self, found: _Run) -> Data | ShardReadError | None:
        """Read a run unless that was done; whoever comes meanwhile waits."""
        with found.lock:
            if found.data is None and found.left:
                try:
                    room = memoryview(self._memory.take())
                    found.data = self._reader.read(found.shard, found.start, found.stop - found.start, room)
                except ShardReadError as error:  # of whoever takes the first sample
                    found.data = error
            return found.data


class _Run:
    def __init__(self, shard: int, start: int, stop: int, left: int) -> None:
        self.shard, self.start, self.stop, self.left = shard, start, stop, left
        self.data: Data | ShardReadError | None = None
        self.lock = threading.Lock()
