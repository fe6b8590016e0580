"""A file on its way: from the source, whose rate may be limited and which is read again when that fails, to LOCAL."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..dataset.manifest import FileInfo
from ..dataset.shard_files import File, RepeatedFile
from ..errors import ShardCorruptError, ShardReadError, StagingError
from ..watched import Moved
from .partial_file import PartialFile, WrongBytes
from .plan import Chunk, Extent, cut_files

logger = logging.getLogger(__name__)

_SLICE_S = 0.5  # of waiting
_memory = threading.local()


class Throttle:
    """Keeps all threads together below a rate in bytes per second (None: any). Thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int, moved: Moved) -> None:
        """Wait until so many bytes may be read; `moved` is called meanwhile."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + num_bytes / self._bytes_per_s
        _wait_until(begin, moved)


def _wait_until(end: float, moved: Moved) -> None:
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))
        moved()


class SourceFile(RepeatedFile):
    """A file of the source. Thread-safe.

    Args:
        path: Path of the file.
        info: Entry of the manifest for it.
        throttle: Limit of the rate of reading.
        retries: Number of times that a failed read is tried again, from 0.
        is_shared: Whether other nodes read parts of it. Then the kernel reads nothing ahead, which would be theirs.
    """

    def __init__(self, path: Path, info: FileInfo, throttle: Throttle, retries: int, is_shared: bool = False) -> None:
        super().__init__(path)
        self.info, self._throttle, self._retries = info, throttle, retries
        self._advice = os.POSIX_FADV_RANDOM if is_shared else os.POSIX_FADV_SEQUENTIAL
        self._began: tuple[int, int, int] | None = None  # what it was when it was first opened

    def open_again(self) -> File:
        """Open the file. Raises OSError."""
        file = super().open_again()
        os.posix_fadvise(file.fd, 0, 0, self._advice)
        self._began = self._began or _state(os.fstat(file.fd))
        return file

    def fill(self, offset: int, into: memoryview, moved: Moved) -> None:
        """Read bytes.

        Args:
            offset: Place in the file.
            into: Memory for them, which is filled.
            moved: Function that is called after each read and while it waits.

        Raises:
            ShardReadError: They cannot be read, or the file is too short.
            StagingError: The file was changed.
        """
        self._throttle.wait(len(into), moved)
        try:
            self.read(offset, len(into), into, self._retries, lambda s: _wait_until(time.monotonic() + s, moved))
        except ShardReadError:
            with suppress(OSError):  # it is gone
                self.check_unchanged()
            raise
        moved()

    def check_unchanged(self) -> None:
        """Raise StagingError if the file was changed, or replaced, since it was first opened."""
        if self._began is not None and _state(os.stat(self.path)) != self._began:
            raise StagingError("was changed while it was copied: stage again when that has ended", path=self.path)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self.file = None


def _state(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns


@dataclass(eq=False)
class Transfer:
    """A file on its way.

    Attributes:
        number: Number of its data set, among those that are copied.
        source: File of the source that is copied.
        landing: File of LOCAL that the bytes go to.
        copied_bytes: Bytes that were read from the source.
    """

    number: int
    source: SourceFile
    landing: PartialFile
    copied_bytes: int = 0

    def lacks(self, extent: Extent) -> bool:
        """Return whether bytes of the file have not landed."""
        return self.landing.lacks(extent.offset)

    def copy(self, extent: Extent, moved: Moved) -> int:
        """Copy bytes; finish the file if they were the last ones. Return the bytes that were read from the source.

        Raises:
            ShardCorruptError, StagingError, OSError: As `finish`, and `SourceFile.fill`.
        """
        data = _thread_buffer(0 if self.landing.was_added(extent.offset) else extent.size)
        self.source.fill(extent.offset, data, moved)
        is_last = self.landing.write(extent.offset, data)
        moved()
        return len(data) + (self.finish(moved) if is_last else 0)

    def read(self, extent: Extent, into: memoryview, moved: Moved) -> int:
        """Read bytes for another node, from LOCAL if they are there.

        Args:
            extent: Extent of this file, which is part of a chunk.
            into: Memory for the bytes, which is filled.
            moved: Function that is called after each read.

        Returns:
            The bytes that were read from the source.
        """
        is_there = not self.lacks(extent) or self.landing.was_added(extent.offset)
        if is_there and self.landing.read(extent.offset, into):
            moved()
            return 0
        self.source.fill(extent.offset, into, moved)
        return extent.size

    def finish(self, moved: Moved) -> int:
        """Check a file of which all bytes have landed, and copy it once more where it is not what it should be.

        Return the bytes that were read from the source. `moved` is called after each read and write.

        Raises:
            ShardCorruptError: The source does not have its checksum either.
            StagingError: The source was changed since it was first read, or LOCAL's disk is damaged.
        """
        source, landing, copied = self.source, self.landing, 0
        try:
            landing.finish(moved)
        except WrongBytes as wrong:
            logger.warning("%s: %s; copying it again", landing.target, wrong)
            source.check_unchanged()
            as_read = xxhash.xxh3_128()
            for offset in range(0, source.info.size_bytes, landing.chunk_bytes):
                data = _thread_buffer(min(landing.chunk_bytes, source.info.size_bytes - offset))
                source.fill(offset, data, moved)
                as_read.update(data)
                landing.write(offset, data)
                copied += len(data)
            try:
                landing.finish(moved)
            except WrongBytes as error:
                source.check_unchanged()
                if as_read.hexdigest() == source.info.xxh3_128:
                    message = f"the disk does not keep what is written to it: {error}, twice; the source is good"
                    raise StagingError(message, path=landing.target) from error
                raise ShardCorruptError(str(error), path=source.path.parent, shard=source.path.name) from error
        finally:
            source.close()
        return copied


def _thread_buffer(size: int) -> memoryview:
    """Return memory of this thread, which the next call uses again."""
    if size > len(getattr(_memory, "buffer", b"")) or not hasattr(_memory, "buffer"):
        _memory.buffer = mmap.mmap(-1, max(size, 1))
    return memoryview(_memory.buffer)[:size]


def missing_chunks(files: list[Transfer]) -> list[Chunk]:
    """List the chunks of some files that have not landed; of small files, only those that are missing."""
    sizes, chunk_bytes = [file.source.info.size_bytes for file in files], files[0].landing.chunk_bytes
    chunks = (tuple(e for e in chunk if files[e.file].lacks(e)) for chunk in cut_files(sizes, chunk_bytes))
    return [chunk for chunk in chunks if chunk]
