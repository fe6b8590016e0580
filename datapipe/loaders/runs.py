"""Runs of neighbouring samples, each read at once, for the order "blocks"."""

from __future__ import annotations

import threading

import numpy as np

from ..dataset import DataSet
from ..reading import Data
from .memory import BatchMemory


class Runs:
    """The runs that one rank needs in one epoch. A run is in memory from its first sample's turn to its last's.

    `runs` and `samples`: int64[N], of each of this rank's positions, in order. `memory` gives room for any run.
    """

    def __init__(self, data_set: DataSet, runs: np.ndarray, samples: np.ndarray, memory: BatchMemory) -> None:
        self._reader, self._memory = data_set.reader, memory
        order = np.argsort(runs, kind="stable")
        runs, records = runs[order], data_set.index[samples[order]]
        starts = np.flatnonzero(np.append(True, runs[1:] != runs[:-1])) if len(runs) else np.empty(0, int)
        ends = records["offset"].astype(np.int64) + records["size"]
        first = np.minimum.reduceat(records["offset"].astype(np.int64), starts) if len(runs) else starts
        stop = np.maximum.reduceat(ends, starts) if len(runs) else starts
        lengths = np.diff(np.append(starts, len(runs)))
        rows = zip(records["shard"][starts].tolist(), first.tolist(), stop.tolist(), lengths.tolist(), strict=True)
        self._runs = {run: _Run(*row) for run, row in zip(runs[starts].tolist(), rows, strict=True)}

    def load(self, run: int) -> int:
        """Read a run unless that was done; a second caller waits for the first. Returns the bytes read."""
        found = self._runs[run]
        with found.lock:
            if found.data is not None or not found.left:
                return 0
            room = memoryview(self._memory.take())
            found.data = self._reader.read(found.shard, found.start, found.stop - found.start, room)
            return len(found.data)

    def take(self, run: int, offset: int, size: int) -> memoryview:
        """The bytes of one sample, which is asked for once."""
        self.load(run)
        found = self._runs[run]
        data = memoryview(found.data)[offset - found.start : offset - found.start + size]
        with found.lock:
            found.left -= 1
            if not found.left:
                found.data = None
        return data


class _Run:
    def __init__(self, shard: int, start: int, stop: int, left: int) -> None:
        self.shard, self.start, self.stop, self.left = shard, start, stop, left
        self.data: Data | None = None
        self.lock = threading.Lock()
