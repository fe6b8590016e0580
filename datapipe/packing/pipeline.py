"""The hot path of packing: threads read samples at the same time, and shards come out in the planned order.

A thread takes the next few samples of the plan (a chunk), reads and checks them, and delivers the chunk to its shard.
Then it places every chunk whose turn has come: the format's writer lays the chunk out behind the previous one,
and the shard's checksum is continued. That takes microseconds. The chunk is written at its place while other threads
read, place and write other chunks. So a read that hangs delays its shard, but no other readers; the bytes are copied
once, from the page cache into memory and back; and a shard is the same for any number of threads.
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

from .. import clock, native
from ..console import printable
from ..dataset.index import sample_checksum
from ..errors import DatapipeError, SourceError
from ..images import Buffer
from ..images.codec import ImageHeader
from ..sources.samples import Files
from .budget import Budget
from .options import PackOptions
from .pace import Access, Pace
from .plan import PackPlan
from .shard import Good, SampleChunk, ShardFile, Stopped
from .state import BadSample, PackedShard

logger = logging.getLogger(__name__)

_READERS = 32  # files read at once, where that helps: what hides the latency of a shared filesystem
_CHUNK_BYTES = 512 << 10  # read by a thread at a time: large enough that delivering it costs little
MAX_CHUNK = 64  # samples
OPEN_SHARDS = 2  # written at the same time: a kernel lets only one thread write to a file
# A chunk's memory is this much larger than twice its expected bytes. A file that does not fit gets memory of its own.
SLACK_BYTES = 256 << 10
CHUNKS_PER_THREAD = 3  # one that it works on, and two that may wait for a slow one before them
# Errors of the file itself, unlike those of the filesystem under it.
BAD_FILE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
            errno.ENOTDIR}  # fmt: skip
SLOW_WAIT_S = 0.25  # between looks at progress and for hangs
_GRACE_S = 2.0  # for threads to end, before they are left to themselves

# Takes an image's bytes, and what to call with the memory that decoding takes, before it is taken. Returns the bytes to
# store, their header, and what was converted. Raises ValueError for a bad image.
Prepare = Callable[[Buffer, Callable[[int], None]], tuple[Buffer, ImageHeader, Sequence[str]]]


class PackPipeline:
    """Writes shards with several threads.

    Args:
        prepare: Function that checks an image's bytes, and returns what is stored.
        options: Options of the pack: threads, bad samples, time and memory.
        plan: Plan that the shards are of.
        num_bad: Number of bad samples that there are already, in finished shards.
    """

    def __init__(self, prepare: Prepare, options: PackOptions, plan: PackPlan, num_bad: int) -> None:
        self._prepare, self._workers, self._timeout_s = prepare, options.workers or _READERS, options.timeout_s
        self._max_bad = options.bad_allowed(plan.num_samples)
        mean_bytes = max(split.mean_bytes for split in plan.splits)
        self._chunk = int(np.clip(_CHUNK_BYTES / max(1, mean_bytes), 1, MAX_CHUNK))
        self._memory_bytes = int(2 * self._chunk * mean_bytes) + SLACK_BYTES
        self._budget = Budget(options.memory_bytes(), len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._num_bad, self._num_done = num_bad, 0
        self._stop = threading.Event()
        self._events: queue.SimpleQueue[tuple[ShardFile, PackedShard] | BaseException] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._chunks: Iterator[tuple[ShardFile, range]] = iter(())  # what is still to be read
        self._accesses: list[Access | None] = []  # of each thread
        self._stopped = np.zeros(1, np.uint8)  # 1 with `_stop`

    def run(
        self, shards: Sequence[ShardFile], on_progress: Callable[[int], None]
    ) -> Iterator[tuple[ShardFile, PackedShard]]:
        """Write the shards; yield each, and its record, once the file is complete, synced and under its name.

        `on_progress` is called with the number of samples written since the last call. Nothing stays under a temporary
        name, also when an exception is raised: SourceError, DatapipeError or OSError, which name the file, and the
        shard where there is one.
        """
        self._chunks = self._divide(shards)
        threads: list[threading.Thread] = []
        pace, num_reported, pending = Pace(), 0, len(shards)
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
                on_progress(done - num_reported)
                num_reported = done
                if len(threads) < self._workers and pace.is_idle(threads, self._accesses):
                    self._add_threads(threads, min(3 * len(threads), self._workers - len(threads)))
                self._look_for_hangs()
        finally:
            self._end(threads, shards)

    def _end(self, threads: Sequence[threading.Thread], shards: Sequence[ShardFile]) -> None:
        """Stop the threads, and remove what is not finished."""
        self._stop.set()
        self._stopped[0] = 1
        self._budget.close()
        for _ in threads:
            self._free.put(None)
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hangs = any(thread.is_alive() for thread in threads)
        # In a thread: while a write to a file hangs, the kernel does not answer a request to remove it either.
        clean = threading.Thread(target=_abandon, args=(shards, not hangs), daemon=True)
        clean.start()
        clean.join(_GRACE_S if hangs else None)

    def _divide(self, shards: Sequence[ShardFile]) -> Iterator[tuple[ShardFile, range]]:
        """Yield the chunks to be read, of several shards in turn."""
        for first in range(0, len(shards), OPEN_SHARDS):
            group = shards[first : first + OPEN_SHARDS]
            totals = [len(shard.which) for shard in group]
            for start in range(0, max(totals), self._chunk):
                for shard, total in zip(group, totals, strict=True):
                    if start < total:
                        yield shard, range(start, min(start + self._chunk, total))

    def _add_threads(self, threads: list[threading.Thread], count: int) -> None:
        for _ in range(count):
            # The first thread is needed in any case.
            if not self._budget.reserve(CHUNKS_PER_THREAD * self._memory_bytes, needed=not threads):
                self._workers = len(threads)
                return
            for _ in range(CHUNKS_PER_THREAD):
                self._free.put(memoryview(mmap.mmap(-1, self._memory_bytes)))  # only pages that are used take memory
            self._accesses.append(None)
            # Daemons: a thread that hangs in a read must not keep the process from ending.
            thread = threading.Thread(target=self._work, args=(len(threads),), name=f"pack-{len(threads)}", daemon=True)
            threads.append(thread)
            thread.start()

    def _look_for_hangs(self) -> None:
        now = clock.now()
        for since, shard, samples, numbers, progress in filter(None, self._accesses):
            which = 0
            if progress is not None:
                number, since_ns = progress.tolist()
                if not number:  # between two files
                    continue
                since, which = since + 1e-9 * since_ns, number - 1
            if now - since > self._timeout_s:
                what, path = ("a read", samples.where(numbers[which])) if samples else ("a write", shard)
                message = f"{what} has not answered for {now - since:.0f} s (--timeout)"
                raise DatapipeError(message, path=path, shard=shard.name)

    # --- in the threads ---

    def _work(self, me: int) -> None:
        try:
            # Memory first, so that chunks get it in their order: the one whose turn it is always has some.
            while (memory := self._free.get()) is not None:
                with self._lock:
                    work = next(self._chunks, None)
                if work is None:
                    return
                chunk = SampleChunk(self._budget, *work, memory)
                self._read(me, chunk)
                chunk.shard.deliver(chunk)
                self._write_ready(me, chunk.shard)
        except Stopped:
            pass
        except BaseException as error:
            self._events.put(error)
        finally:
            self._accesses[me] = None

    def _read(self, me: int, chunk: SampleChunk) -> None:
        """Read all images, then check all: the caches still hold the code of a step that is repeated."""
        shard, samples, memory = chunk.shard, chunk.shard.samples, chunk.memory
        numbers = shard.which[chunk.which.start : chunk.which.stop].tolist()
        images: list[Buffer | Exception] = []
        known = self._read_files(me, chunk, numbers)
        at, start = sum(size for size, _ in known if size > 0), 0
        for sample, (size, _) in zip(numbers, known, strict=True):
            if self._stop.is_set():
                raise Stopped
            if size >= 0:
                images.append(memory[start : start + size])
                start += size
                continue
            self._accesses[me] = (clock.now(), shard.path, samples, (sample,), None)
            try:
                data = samples.read(sample, memory[at:])
                if isinstance(data, memoryview):
                    at += len(data)
                elif len(data) > SLACK_BYTES:
                    chunk.hold(len(data))
                images.append(data)
            except (ValueError, OSError) as error:
                images.append(error)
        self._accesses[me] = None
        for i, sample, image, (_, digest) in zip(chunk.which, numbers, images, known, strict=True):
            hold = 0
            try:
                if isinstance(image, Exception):
                    raise image
                stored, header, converted = self._prepare(image, chunk.claim)
            except MemoryError as error:
                reason = f"cannot be packed: {error or 'there is not enough memory for it; allow less with --memory'}"
                raise SourceError(reason, path=samples.where(sample), shard=shard.path.name) from error
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in BAD_FILE:
                    message = f"cannot be read: {error.strerror or error}"
                    raise SourceError(message, path=samples.where(sample), shard=shard.path.name) from error
                chunk.images.append(self._bad(shard, i, sample, error))
            else:
                hold = 0 if stored is image else len(stored)
                if stored is not image or not digest:
                    digest = sample_checksum(stored)
                chunk.images.append(Good(sample, stored, header, len(image), converted, digest))
            chunk.end_claim(hold)

    def _read_files(self, me: int, chunk: SampleChunk, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Read files into the chunk's memory without the interpreter's lock, as `Native.read_files` does."""
        samples, library = chunk.shard.samples, native.choose().native
        if library is None or not isinstance(samples, Files):
            return [(-1, 0)] * len(numbers)
        progress = np.zeros(native.PROGRESS, np.int64)
        self._accesses[me] = (clock.now(), chunk.shard.path, samples, numbers, progress)
        places = list(map(samples.place, numbers))
        return library.read_files(places, samples.flags, chunk.memory, self._stopped, progress)

    def _bad(self, shard: ShardFile, i: int, sample: int, error: ValueError | OSError) -> BadSample:
        """Count and log a bad sample, with its reason in our own words. Raises SourceError for too many."""
        path, details = shard.samples.where(sample), getattr(error, "strerror", None) or error
        with self._lock:
            self._num_bad += 1
            number = self._num_bad
        if number > self._max_bad:
            allowed = f"; that is number {number}, and --max-bad allows {self._max_bad}" if self._max_bad else ""
            raise SourceError(f"cannot be packed: {details}{allowed}", path=path, shard=shard.path.name) from error
        logger.warning("%s is left out: %s", printable(path), details)
        reason = getattr(error, "reason", str(error))
        if isinstance(error, OSError) and error.errno:
            reason = f"cannot be read ({errno.errorcode[error.errno]})"
        return BadSample(i, path, reason)

    def _write_ready(self, me: int, shard: ShardFile) -> None:
        """Place and write the chunks whose turn has come, and finish the shard behind its last one."""
        while (chunk := shard.begin_placing()) is not None:
            count = len(chunk.images)
            self._begin_write(me, shard)
            position, pieces = shard.place(chunk)
            self._budget.look_again()
            self._begin_write(me, shard)
            shard.write(position, pieces)
            pieces.clear()
            chunk.let_go()
            self._free.put(chunk.memory)
            with self._lock:
                self._num_done += count
            if shard.end_writing(count):
                begin = partial(self._begin_write, me, shard)
                begin()
                self._events.put((shard, shard.finish(self._stop, begin)))
            self._accesses[me] = None

    def _begin_write(self, me: int, shard: ShardFile) -> None:
        self._accesses[me] = (clock.now(), shard.path, None, (), None)


def _abandon(shards: Sequence[ShardFile], close: bool) -> None:
    for shard in shards:
        shard.abandon(close)
