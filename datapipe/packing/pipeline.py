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
from functools import partial

import numpy as np

from ..dataset.index import sample_checksum
from ..errors import DatapipeError, SourceError
from ..images import Buffer
from ..images.codec import ImageHeader
from ..sources import Samples
from .budget import Budget
from .journal import BadSample, PackedShard
from .memory import return_free_bytes
from .shard import Good, Shard, ShardTask, Stopped

logger = logging.getLogger(__name__)

CHUNK_BYTES = 512 << 10  # read by a thread at a time: large enough that handing over costs little
MAX_CHUNK = 64  # samples
OPEN_SHARDS = 2  # written at the same time: a kernel lets only one thread write to a file
# Of each chunk's memory, beside twice its expected bytes: a file that does not fit is read in two pieces.
SLACK_BYTES = 256 << 10
CHUNKS_A_THREAD = 3  # that it works on, or that wait for one that is slow
LARGE_BYTES = 64 << 20  # decoded: worth a call that makes sure that it is free
# What a file can do wrong by itself, unlike the filesystem under it.
BAD_FILE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
            errno.ENOTDIR}  # fmt: skip
SLOW_WAIT_S = 0.25  # between looks at progress and at what hangs
GRACE_S = 2.0  # for threads to end, before they are left to themselves

# An image's bytes, and what to call with the memory that it takes before that is used.
Prepare = Callable[[Buffer, Callable[[int], None]], tuple[Buffer, ImageHeader, Sequence[str]]]


class _Chunk:
    def __init__(self, budget: Budget, shard: Shard, which: range, memory: memoryview) -> None:
        self.shard, self.which, self.memory = shard, which, memory  # which of the shard's samples
        self.images: list[Good | BadSample] = []
        self._budget = budget
        self._claimed = self._held = 0

    def is_awaited(self) -> bool:
        """Is it the one whose turn it is?"""
        return self.which.start == self.shard.head

    def claim(self, size: int) -> None:
        """Wait until an image may be decoded. Raises MemoryError, Stopped."""
        if not self._budget.claim(size, self.is_awaited):
            raise Stopped
        self._claimed = size

    def end_claim(self, hold: int) -> None:
        """The image has been decoded, if it had to be; of its memory so much is used until it is written."""
        if self._claimed:
            if self._claimed >= LARGE_BYTES:
                return_free_bytes()
            self._budget.release(self._claimed, hold)
            self._claimed, self._held = 0, self._held + hold

    def hold(self, size: int) -> None:
        """Count memory beside the chunk's own."""
        self._budget.hold(size)
        self._held += size

    def let_go(self) -> None:
        """All is written."""
        self.images.clear()
        if self._held:
            self._budget.let_go(self._held)


_Doing = tuple[float, str, Samples | None, int]


class Assembly:
    """Writes shards with up to `workers` threads. `prepare` checks an image's bytes and gives what is stored.

    `max_bad`: how many samples may be bad, of which `num_bad` were found before; `timeout_s`: a single read or write
    that takes longer is an error; `mean_bytes`: of an image, about; `memory_bytes`: for images in all threads.
    """

    def __init__(
        self,
        prepare: Prepare,
        workers: int,
        max_bad: int,
        timeout_s: float,
        mean_bytes: float,
        memory_bytes: int,
        num_bad: int = 0,
    ) -> None:
        self._prepare, self._workers, self._max_bad, self._timeout_s = prepare, workers, max_bad, timeout_s
        self._chunk = int(np.clip(CHUNK_BYTES / max(1, mean_bytes), 1, MAX_CHUNK))
        self._memory_bytes = int(2 * self._chunk * mean_bytes) + SLACK_BYTES
        self._budget = Budget(memory_bytes, len(os.sched_getaffinity(0)))
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
                if len(threads) < self._workers and pace.is_idle(threads, self._doing):
                    self._add_threads(threads, min(3 * len(threads), self._workers - len(threads)))
                self._look_for_hangs()
        finally:
            self._stop.set()
            self._budget.close()
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
            # The first one cannot be done without.
            if not self._budget.reserve(CHUNKS_A_THREAD * self._memory_bytes, needed=not threads):
                self._workers = len(threads)
                return
            for _ in range(CHUNKS_A_THREAD):
                self._free.put(memoryview(mmap.mmap(-1, self._memory_bytes)))  # of which only what is used costs
            self._doing.append(None)
            # Daemons: one that hangs in a read must not keep the process from ending.
            thread = threading.Thread(target=self._work, args=(len(threads),), name=f"pack-{len(threads)}", daemon=True)
            threads.append(thread)
            thread.start()

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        first = min((doing for doing in self._doing if doing), key=lambda doing: doing[0], default=None)
        if first and now - first[0] > self._timeout_s:
            since, shard, samples, sample = first
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
                chunk = _Chunk(self._budget, *work, memory)
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
                elif len(data) > SLACK_BYTES:
                    chunk.hold(len(data))
                images.append(data)
            except (ValueError, OSError) as error:
                images.append(error)
        self._doing[me] = None
        for i, sample, data in zip(chunk.which, numbers, images, strict=True):
            hold = 0
            try:
                if isinstance(data, Exception):
                    raise data
                stored, header, converted = self._prepare(data, chunk.claim)
            except MemoryError as error:
                reason = f"cannot be packed: {error or 'there is not enough memory for it; allow less with --memory'}"
                raise SourceError(reason, path=samples.where(sample), shard=shard.name) from error
            except ValueError as error:
                chunk.images.append(self._bad(task, i, sample, str(error), error))
            except OSError as error:
                if error.errno not in BAD_FILE:
                    message = f"cannot be read: {error.strerror or error}"
                    raise SourceError(message, path=samples.where(sample), shard=shard.name) from error
                chunk.images.append(self._bad(task, i, sample, error.strerror, error))
            else:
                hold = 0 if stored is data else len(stored)
                chunk.images.append(Good(sample, stored, header, len(data), converted, sample_checksum(stored)))
            chunk.end_claim(hold)

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
            self._begin_write(me, shard)
            position, pieces = shard.place(chunk.images)
            with self._lock:
                shard.placing = False
                shard.head = chunk.which.stop
            self._budget.look_again()
            self._begin_write(me, shard)
            shard.write(position, pieces)
            pieces.clear()
            chunk.let_go()
            self._free.put(chunk.memory)
            with self._lock:
                self._num_done += count
                shard.left -= count
                last = not shard.left
            if last:
                begin = partial(self._begin_write, me, shard)
                begin()
                self._events.put((shard.task, shard.finish(self._stop, begin)))
            self._doing[me] = None

    def _begin_write(self, me: int, shard: Shard) -> None:
        self._doing[me] = (time.monotonic(), shard.task.path, None, -1)


def _abandon(shards: Sequence[Shard], close: bool) -> None:
    for shard in shards:
        shard.abandon(close)


class _Pace:
    """Do the threads wait for the filesystem, while the processor is idle? Then more of them help."""

    WAIT_S = 0.01  # between looks
    IDLE = 0.4  # of all cores' time
    WAITING = 0.5  # of the threads
    LOOKS = 3  # one after the other that must show it

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self._wall, self._cpu, self._looks = time.monotonic(), time.process_time(), 0

    def is_idle(self, threads: Sequence[threading.Thread], doing: Sequence[_Doing | None]) -> bool:
        wall, cpu = time.monotonic(), time.process_time()
        since = wall - self._wall
        if since < self.WAIT_S:
            return False
        used = (cpu - self._cpu) / since
        self._wall, self._cpu = wall, cpu
        # A processor that is used little may also be busy with other jobs: then these threads do not sleep.
        reading = [thread for thread, what in zip(threads, doing, strict=True) if what and what[2] is not None]
        waits = used < self.IDLE * self.cores and sum(map(_sleeps, reading)) >= self.WAITING * len(threads)
        self._looks = self._looks + 1 if waits else 0
        if self._looks < self.LOOKS:
            return False
        self._looks = 0
        return True


def _sleeps(thread: threading.Thread) -> bool:
    """Does a thread wait, rather than run, or for a processor? (proc(5), /proc/pid/task/tid/stat, field 3)"""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"R"
    except (OSError, IndexError):
        return True
