"""How many threads a pack needs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..sources import Samples

# What a thread waits for: since when, the shard, and the samples that it reads, or None when it writes. With several
# samples, the progress of the decoder in C says which it is at. A plain tuple, as one is made for each sample.
Access = tuple[float, Path, Samples | None, Sequence[int], np.ndarray | None]


class Pace:
    """Tells whether more threads would help: these wait for the filesystem, and the processor is idle."""

    WAIT_S = 0.01  # between looks
    IDLE = 0.4  # of all cores' time
    WAITING = 0.5  # of the threads
    LOOKS = 3  # in a row that must show it

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self._wall, self._cpu, self._looks = time.monotonic(), time.process_time(), 0

    def is_idle(self, threads: Sequence[threading.Thread], accesses: Sequence[Access | None]) -> bool:
        """Look once more, and say whether the last looks have all shown threads that wait and an idle processor."""
        wall, cpu = time.monotonic(), time.process_time()
        since = wall - self._wall
        if since < self.WAIT_S:
            return False
        used = (cpu - self._cpu) / since
        self._wall, self._cpu = wall, cpu
        # This process may also use the processor little because others do. Then its threads do not sleep.
        pairs = zip(threads, accesses, strict=True)
        reading = [thread for thread, access in pairs if access and access[2] is not None]
        waits = used < self.IDLE * self.cores and sum(map(_sleeps, reading)) >= self.WAITING * len(threads)
        self._looks = self._looks + 1 if waits else 0
        if self._looks < self.LOOKS:
            return False
        self._looks = 0
        return True


def _sleeps(thread: threading.Thread) -> bool:
    """Whether a thread neither runs nor waits for a processor (proc(5), /proc/pid/task/tid/stat, field 3)."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"R"
    except (OSError, IndexError):
        return True
