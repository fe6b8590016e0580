"""The hot path of packing: threads read samples at the same time, and shards come out in the planned order.

A thread takes the next few samples of the plan (a chunk), reads and checks them, and delivers the chunk to its shard.
Whoever finds that the chunk whose turn it is has been delivered gives it its place: the writer lays it out behind the
last one, and the shard's checksum goes on. That takes microseconds; then it is written at its place, while other
threads read, lay out and write other chunks. So a read that hangs delays its shard, not the other readers; the bytes
are copied once, from the page cache into memory and back; and a shard is the same whatever the number of threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .errors import DatapipeError, SourceError
from .formats import Buffer
from .image import ImageHeader
from .index import sample_checksum
from .journal import BadSample, PackedShard
from .shards import Good, Shard, ShardTask, Stopped
from .sources import Samples

logger = logging.getLogger(__name__)

CHUNK_BYTES = 512 << 10  # read by a thread at a time: large enough that handing over costs little
MAX_CHUNK = 64  # samples
OPEN_SHARDS = 2  # written at the same time: a kernel lets only one thread write to a file
# Of each chunk's memory, beside twice its expected bytes: a file that does not fit is read in two pieces.
SLACK_BYTES = 256 << 10
CHUNKS_A_THREAD = 3  # that it works on, or that wait for one that is slow
# What a file can do wrong by itself, unlike the filesystem under it.
BAD_FILE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
            errno.ENOTDIR}  # fmt: skip
SLOW_WAIT_S = 0.25  # between looks at progress and at what hangs
GRACE_S = 2.0  # for threads to end, before they are left to themselves

Prepare = Callable[[Buffer], tuple[Buffer, ImageHeader, Sequence[str]]]


class _Chunk(NamedTuple):
    shard: Shard
    which: range  # of the shard's samples
    memory: memoryview
    images: list[Good | BadSample]


_Doing = tuple[float, str, Samples | None, int]


class Assembly:
    """Writes shards with up to `workers` threads. `prepare` checks an image's bytes and gives what is stored.

    `max_bad`: how many samples may be bad, of which `num_bad` were found before; `timeout_s`: a single read or write
    that takes longer is an error; `mean_bytes`: of an image, about.
    """

    def __init__(
        self, prepare: Prepare, workers: int, max_bad: int, timeout_s: float, mean_bytes: float, num_bad: int = 0
    ) -> None:
        self._prepare, self._workers, self._max_bad, self._timeout_s = prepare, workers, max_bad, timeout_s
        self._chunk = int(np.clip(CHUNK_BYTES / max(1, mean_bytes), 1, MAX_CHUNK))
        self._memory_bytes = int(2 * self._chunk * mean_bytes) + SLACK_BYTES
        self._lock = threading.Lock()
        self._num_bad, self._num_done = num_bad, 0
        self._stop = threading.Event()
        self._events: queue.SimpleQueue[tuple[ShardTask, PackedShard] | BaseException] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._doing: list[_Doing | None] = []  # of each thread

    def run(
        self, tasks: Sequence[ShardTask], on_progress: Callable[[int], None]
    ) -> Iterator[tuple[ShardTask, PackedShard]]:
        """Write the shards; yield each task and its shard once that is complete, under its name and synced.

        `on_progress` is told of samples done. On the way out by an exception nothing stays under a temporary name.
        Raises SourceError, DatapipeError, OSError; each names the file, and the shard where there is one.
        """
        shards = [Shard(task) for task in tasks]
        self._chunks = self._cut(shards)
        threads: list[threading.Thread] = []
        pace, told, pending = _Pace(), 0, len(tasks)
        try:
            self._add_threads(threads, min(pace.cores, self._workers))
            while pending:
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=pace.WAIT_S if len(threads) < self._workers else SLOW_WAIT_S)
                    if isinstance(event, BaseException):
                        raise event
                    pending -= 1
                    yield event
                done = self._num_done
                on_progress(done - told)
                told = done
                if len(threads) < self._workers and pace.is_idle():
                    self._add_threads(threads, min(3 * len(threads), self._workers - len(threads)))
                self._look_for_hangs()
        finally:
            self._stop.set()
            for _ in threads:
                self._free.put(None)
            deadline = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            hangs = any(thread.is_alive() for thread in threads)
            # In a thread: the kernel removes no file to which a write hangs before that is answered.
            clean = threading.Thread(target=_abandon, args=(shards, not hangs), daemon=True)
            clean.start()
            clean.join(GRACE_S if hangs else None)

    def _cut(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, range]]:
        """Chunks, of several shards in turn."""
        for first in range(0, len(shards), OPEN_SHARDS):
            group = shards[first : first + OPEN_SHARDS]
            totals = [len(shard.task.which) for shard in group]
            for start in range(0, max(totals), self._chunk):
                for shard, total in zip(group, totals, strict=True):
                    if start < total:
                        yield shard, range(start, min(start + self._chunk, total))

    def _add_threads(self, threads: list[threading.Thread], count: int) -> None:
        for _ in range(count):
            for _ in range(CHUNKS_A_THREAD):
                self._free.put(memoryview(mmap.mmap(-1, self._memory_bytes)))  # of which only what is used costs
            self._doing.append(None)
            # Daemons: one that hangs in a read must not keep the process from ending.
            thread = threading.Thread(target=self._work, args=(len(threads),), name=f"pack-{len(threads)}", daemon=True)
            threads.append(thread)
            thread.start()

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        for doing in self._doing:
            if doing and now - doing[0] > self._timeout_s:
                since, shard, samples, sample = doing
                what, path = ("a read", samples.where(sample)) if samples else ("a write", shard)
                raise DatapipeError(
                    f"{what} has not answered for {now - since:.0f} s (--timeout)", path=path, shard=shard.name
                )

    # --- in the threads ---

    def _work(self, me: int) -> None:
        try:
            # Memory first: so the chunk whose turn it is in its shard always has some.
            while (memory := self._free.get()) is not None:
                with self._lock:
                    work = next(self._chunks, None)
                if work is None:
                    return
                chunk = _Chunk(*work, memory, [])
                self._read(me, chunk)
                with self._lock:
                    chunk.shard.ready[chunk.which.start] = chunk
                self._write_what_is_ready(me, chunk.shard)
        except Stopped:
            pass
        except BaseException as error:
            self._events.put(error)
        finally:
            self._doing[me] = None

    def _read(self, me: int, chunk: _Chunk) -> None:
        """Read all, then look at all: code that has just run runs faster than after a call of the system."""
        task, memory, at = chunk.shard.task, chunk.memory, 0
        samples, shard = task.samples, task.path
        numbers = task.which[chunk.which.start : chunk.which.stop].tolist()
        images: list[Buffer | Exception] = []
        for sample in numbers:
            if self._stop.is_set():
                raise Stopped
            self._doing[me] = (time.monotonic(), shard, samples, sample)
            try:
                data = samples.read(sample, memory[at:])
                if isinstance(data, memoryview):
                    at += len(data)
                images.append(data)
            except (ValueError, OSError) as error:
                images.append(error)
        self._doing[me] = None
        for i, sample, data in zip(chunk.which, numbers, images, strict=True):
            try:
                if isinstance(data, Exception):
                    raise data
                stored, header, converted = self._prepare(data)
            except ValueError as error:
                chunk.images.append(self._bad(task, i, sample, str(error), error))
            except OSError as error:
                if error.errno not in BAD_FILE:
                    message = f"cannot be read: {error.strerror or error}"
                    raise SourceError(message, path=samples.where(sample), shard=shard.name) from error
                chunk.images.append(self._bad(task, i, sample, error.strerror, error))
            else:
                chunk.images.append(Good(sample, stored, header, len(data), converted, sample_checksum(stored)))

    def _bad(self, task: ShardTask, i: int, sample: int, reason: str, error: Exception) -> BadSample:
        path = task.samples.where(sample)
        with self._lock:
            self._num_bad += 1
            number = self._num_bad
        if number > self._max_bad:
            allowed = f"; that is number {number}, and --max-bad allows {self._max_bad}" if self._max_bad else ""
            raise SourceError(f"cannot be packed: {reason}{allowed}", path=path, shard=task.path.name) from error
        logger.warning("%s is left out: %s", path, reason)
        return BadSample(i, path, reason)

    def _write_what_is_ready(self, me: int, shard: Shard) -> None:
        while True:
            with self._lock:
                chunk = None if shard.placing else shard.ready.pop(shard.head, None)
                if chunk is None:
                    return
                shard.placing = True
            count = len(chunk.images)
            self._doing[me] = (time.monotonic(), shard.task.path, None, -1)
            position, pieces = shard.place(chunk.images)
            with self._lock:
                shard.placing = False
                shard.head = chunk.which.stop
            shard.write(position, pieces)
            chunk.images.clear()
            self._free.put(chunk.memory)
            with self._lock:
                self._num_done += count
                shard.left -= count
                last = not shard.left
            if last:
                self._events.put((shard.task, shard.finish(self._stop)))
            self._doing[me] = None


def _abandon(shards: Sequence[Shard], close: bool) -> None:
    for shard in shards:
        shard.abandon(close)


class _Pace:
    """Is the processor idle? Then more readers help: all wait for the filesystem. Else they only hinder each other."""

    WAIT_S = 0.01  # between looks
    IDLE = 0.4  # of all cores' time

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def is_idle(self) -> bool:
        wall, cpu = time.monotonic(), time.process_time()
        since = wall - self._wall
        if since < self.WAIT_S:
            return False
        used = (cpu - self._cpu) / since
        self._wall, self._cpu = wall, cpu
        return used < self.IDLE * self.cores
