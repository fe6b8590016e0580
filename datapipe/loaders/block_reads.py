"""Runs of neighbouring samples, each read at once, for the order "blocks"."""

from __future__ import annotations

import threading

import numpy as np

from ..dataset import DataSet
from ..dataset.shard_reader import Data
from ..errors import ShardReadError
from ..sampling.block_order import BlockOrder, Needs
from .batch_memory import BatchMemory
from .threads import Pool

READ_AHEAD = 8  # runs, beyond those that the batches under way need: rides out the times when many lanes begin one


class Runs:
    """The runs that one rank needs in one epoch. A run is in memory from shortly before its first sample's turn to its
    last's.

    `needs` are those of `order`. `memory` gives room for any run, and `readers` read them ahead.
    """

    def __init__(self, data_set: DataSet, order: BlockOrder, needs: Needs, memory: BatchMemory, readers: Pool) -> None:
        self._index, self._reader, self._memory, self._readers = data_set.index, data_set.reader, memory, readers
        self._order, self._needs = order, needs
        self._runs: dict[int, Run] = {}  # those that were begun and may still be needed, by their number
        self._begun, self._futures = 0, []

    def begin(self, step: int, numbers: list[int]) -> list[Run]:
        """Give the runs with these numbers, whose samples are about to be taken at this step, and begin to read them
        and a few more.
        """
        stop = int(np.searchsorted(self._needs.first, step, "right")) + READ_AHEAD
        self._futures = [future for future in self._futures if not future.done()]
        for number, last in zip(*(column[self._begun : stop].tolist() for column in self._needs[::2]), strict=True):
            run = self._runs[number] = Run(self._order.samples_of(number), last)
            self._futures.append(self._readers.submit(self._load, run))
        self._begun = max(self._begun, stop)
        runs = [self._runs[number] for number in numbers]
        self._runs = {number: run for number, run in self._runs.items() if run.last > step}
        return runs

    def end(self) -> None:
        """Read nothing more ahead."""
        for future in self._futures:
            future.cancel()

    def take(self, run: Run, offset: int, size: int) -> memoryview:
        """The bytes of one sample, which is asked for once. Raises ShardReadError."""
        data = self._load(run)
        if isinstance(data, ShardReadError):
            raise data
        with run.lock:
            run.left -= 1
            if not run.left:
                run.data = None
        return memoryview(data)[offset - run.start : offset - run.start + size]

    def _load(self, run: Run) -> Data | ShardReadError | None:
        """Read a run unless that was done; whoever comes meanwhile waits."""
        with run.lock:
            if run.data is None and run.left:
                records = self._index[run.samples]
                starts = records["offset"].astype(np.int64)
                run.start, stop = int(starts.min()), int((starts + records["size"]).max())
                try:
                    room = memoryview(self._memory.take())
                    run.data = self._reader.read(int(records["shard"][0]), run.start, stop - run.start, room)
                except ShardReadError as error:  # of whoever takes the first sample
                    run.data = error
            return run.data


class Run:
    """`samples` int64[N], in the order of the file; `last`: the step at which it may be needed last."""

    def __init__(self, samples: np.ndarray, last: int) -> None:
        self.samples, self.last = samples, last
        self.start = 0  # of its bytes in the shard
        self.left = len(samples)  # not taken yet; some of them others may take
        self.data: Data | ShardReadError | None = None
        self.lock = threading.Lock()
