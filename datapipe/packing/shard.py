"""One shard being written, under a temporary name until it is complete."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ..dataset.index import ENCODINGS, RECORD, pack_record
from ..dataset.manifest import FileInfo, ShardInfo
from ..errors import SettingError, SourceError
from ..formats import shard_format
from ..fsio import atomic_write, checksum, named, partial_path, sync_folder
from ..images import Buffer
from ..images.codec import ImageHeader
from ..memory import return_free_bytes
from .budget import Budget
from .plan import SplitPlan
from .state import BadSample, PackedShard

logger = logging.getLogger(__name__)

MAX_PIECES = 1024  # IOV_MAX of Linux (limits.h)
LARGE_BYTES = 64 << 20  # decoded: worth a call that gives the memory back to the kernel


class Stopped(Exception):
    """Raised in a thread when the main thread has ended the work."""


class Good(NamedTuple):
    """A sample that is ready to be stored."""

    sample: int
    data: Buffer
    header: ImageHeader
    source_bytes: int
    converted: Sequence[str]
    checksum: int


class ShardFile:
    """A shard being written, in chunks: read in any order, placed in the shard's, written in any.

    Many threads `deliver` chunks, one at a time places the one whose turn it is, and many `write` what is placed.

    Args:
        split: Plan of the split.
        number: Number of the shard in the split.
        folder: Folder of the shard.
        format: Format of the shard.

    Attributes:
        path: Path of the finished shard.
        samples: All samples of the split.
        which: Samples of this shard, int64.
    """

    def __init__(self, split: SplitPlan, number: int, folder: Path, format: str) -> None:
        self.path = folder / f"shard-{number:06}{shard_format(format).SUFFIX}"
        self.samples, self.which = split.samples, split.shards[number]
        self._number, self._format, self._keys = number, format, split.keys
        self._lock = threading.Lock()
        self._ready: dict[int, SampleChunk] = {}  # by the first sample
        self.next = 0  # the first sample of the chunk whose turn it is
        self._is_placing = False
        self._num_written = 0
        self._partial = partial_path(self.path)
        self._fd = -1
        self._position = 0
        self._digest = xxhash.xxh3_128()
        self._records = bytearray()  # of RECORD, packed
        self._channels = 1
        self._source_bytes = 0
        self._converted: Counter[str] = Counter()
        self._bad: list[BadSample] = []

    def deliver(self, chunk: SampleChunk) -> None:
        """Take a chunk that has been read."""
        with self._lock:
            self._ready[chunk.which.start] = chunk

    def begin_placing(self) -> SampleChunk | None:
        """Return the chunk whose turn it is; None when it has not been read, or another thread is placing one."""
        with self._lock:
            chunk = None if self._is_placing else self._ready.pop(self.next, None)
            self._is_placing = self._is_placing or chunk is not None
            return chunk

    def place(self, chunk: SampleChunk) -> tuple[int, list[Buffer]]:
        """Lay out the chunk whose turn it is; return where in the file it goes, and the pieces to write there."""
        pieces: list[Buffer] = []
        if self._fd < 0:
            self._writer = shard_format(self._format).Writer()
            with named(self._partial):
                self._fd, self._partial = _open_alone(self._partial)
            pieces.append(self._writer.head)
        samples, keys = self.samples, self._keys
        for image in chunk.images:
            if isinstance(image, BadSample):
                self._bad.append(image)
                continue
            sample, data, header, source_bytes, converted, checksum = image
            label = int(samples.labels[sample])
            try:
                pieces += self._writer.add(keys[sample], label, data, header)
            except ValueError as error:
                path = samples.where(sample)
                raise SourceError(f"cannot be packed into {self._format}: {error}", path=path) from error
            self._records += pack_record(
                0, len(data), self._number, label, checksum,
                header.width, header.height, header.restart_interval, ENCODINGS.index(header.encoding)
            )  # fmt: skip
            self._channels |= header.channels  # 1 | 3 == 3
            self._source_bytes += source_bytes
            if converted:
                self._converted.update(converted)
        position = self._position
        self._position += sum(map(len, pieces))
        update = self._digest.update
        for piece in pieces:
            update(piece)
        with self._lock:
            self._is_placing = False
            self.next = chunk.which.stop
        return position, pieces

    def write(self, position: int, pieces: Sequence[Buffer]) -> None:
        """Write what `place` has returned, and have the disk begin with it: `finish` then waits for little."""
        with named(self._partial):
            size = _write_at(self._fd, position, pieces)
            with suppress(OSError):  # a filesystem may not take advice
                os.posix_fadvise(self._fd, position, size, os.POSIX_FADV_DONTNEED)

    def end_writing(self, count: int) -> bool:
        """Count samples that are written; return whether the shard has no others."""
        with self._lock:
            self._num_written += count
            return self._num_written == len(self.which)

    def finish(self, stop: threading.Event, begin: Callable[[], None]) -> PackedShard:
        """Complete the file and give it its name. Called once, when everything is written.

        `begin` is called before each step that is a wait for the disk, so that one that hangs is noticed.
        """
        path, sidecars, info = self.path, [], None
        records = np.frombuffer(bytearray(self._records), RECORD)
        if len(records):
            finished = self._writer.finish()
            records["offset"] = finished.offsets
            size = self._position + len(finished.tail)
            with named(self._partial):
                _write_at(self._fd, self._position, [finished.tail])
                for position, content in finished.patches.items():
                    _write_at(self._fd, position, [content])
                begin()
                os.fsync(self._fd)
                begin()
                self._digest.update(finished.tail)
                digest = checksum(self._partial) if finished.patches else self._digest.hexdigest()
                if os.fstat(self._fd).st_size != size:
                    raise OSError(errno.EIO, f"the file does not have the {size} bytes that were written")
                if stop.is_set():
                    raise Stopped
                begin()
                os.replace(self._partial, path)
                sync_folder(path.parent)
            info = ShardInfo(name=path.name, num_samples=len(records), size_bytes=size, xxh3_128=digest)
            for suffix, content in finished.sidecars.items():
                with atomic_write(path.with_suffix(suffix), alone=self._partial == partial_path(path)) as file:
                    file.write(content)
                sidecars.append(file_info(path.with_suffix(suffix)))
        else:
            self._partial.unlink()
        os.close(self._fd)
        self._fd = -1
        self._bad.sort(key=lambda bad: bad.number)
        converted = dict(sorted(self._converted.items()))
        return PackedShard(
            self._number, info, sidecars, records, self._channels, self._source_bytes, converted, self._bad
        )

    def abandon(self, close: bool) -> None:
        """Remove the file if it is not finished.

        `close`: also close its descriptor. Not while a thread hangs in a write: the number could be another file's
        when the write goes through.
        """
        if self._fd >= 0:
            try:
                self._partial.unlink(missing_ok=True)
            except OSError as error:  # the error that came before it matters more
                logger.warning("%s cannot be removed: %s", self._partial, error.strerror)
            if close:
                os.close(self._fd)


class SampleChunk:
    """Consecutive samples of a shard, with the memory that they are read into."""

    def __init__(self, budget: Budget, shard: ShardFile, which: range, memory: memoryview) -> None:
        self.shard, self.which, self.memory = shard, which, memory  # which of the shard's samples
        self.images: list[Good | BadSample] = []
        self._budget = budget
        self._claimed_bytes = self._held_bytes = 0

    def is_awaited(self) -> bool:
        """Whether the shard cannot continue without this chunk."""
        return self.which.start == self.shard.next

    def claim(self, size: int) -> None:
        """Wait until an image may be decoded. Raises MemoryError, Stopped."""
        if not self._budget.claim(size, self.is_awaited):
            raise Stopped
        self._claimed_bytes = size

    def end_claim(self, hold: int) -> None:
        """Release what was claimed, if anything was; `hold` bytes of it remain in use until the image is written."""
        if self._claimed_bytes:
            if self._claimed_bytes >= LARGE_BYTES:
                return_free_bytes()
            self._budget.release(self._claimed_bytes, hold)
            self._claimed_bytes, self._held_bytes = 0, self._held_bytes + hold

    def hold(self, size: int) -> None:
        """Count memory beside the chunk's own."""
        self._budget.hold(size)
        self._held_bytes += size

    def let_go(self) -> None:
        """Release everything: the chunk is written."""
        self.images.clear()
        if self._held_bytes:
            self._budget.let_go(self._held_bytes)


def _write_at(fd: int, position: int, pieces: Sequence[Buffer]) -> int:
    """Write pieces to a file from a position on, one behind another; return their size in bytes."""
    begin = position
    for first in range(0, len(pieces), MAX_PIECES):
        group = pieces[first : first + MAX_PIECES]
        expected = sum(map(len, group))
        written = os.pwritev(fd, group, position)
        if written < expected:  # interrupted by a signal, or the disk is full: the next attempt tells
            rest = memoryview(b"".join(group))[written:]
            at = position + written
            while rest:
                count = os.pwrite(fd, rest, at)
                rest, at = rest[count:], at + count
        position += expected
    return position - begin


def file_info(path: Path) -> FileInfo:
    """Return the size and checksum of a file, which is read."""
    return FileInfo(name=path.name, size_bytes=path.stat().st_size, xxh3_128=checksum(path))


def _open_alone(path: Path) -> tuple[int, Path]:
    """Open a temporary file for writing, empty, and for this process alone; return its descriptor and its path.

    Where files cannot be locked, the path is another one beside `path`, which no other process knows. Raises
    SettingError when another process is writing the file.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)  # a link is not ours
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise SettingError(f"OUT: another process is writing {path}; is a task running twice?") from error
        except OSError:  # the filesystem has no locks, and `locked` has warned
            os.close(fd)
            path.unlink(missing_ok=True)
            path = partial_path(path.with_name(path.name[1:].removesuffix(".partial")), alone=False)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
            os.ftruncate(fd, 0)
            return fd, path
        os.close(fd)  # meanwhile the other process has given the file its final name
