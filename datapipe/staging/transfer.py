"""A file on its way from the source to LOCAL."""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import xxhash

from ..errors import ShardCorruptError, StagingError
from ..watched import Moved
from .partial_file import PartialFile, WrongBytes
from .plan import Chunk, Extent, cut
from .source_files import SourceFile

logger = logging.getLogger(__name__)
_memory = threading.local()


@dataclass(frozen=True)
class Transfer:
    """A file on its way.

    Attributes:
        number: Number of its data set, among those that are copied.
        source: File of the source that is copied.
        landing: File of LOCAL that the bytes go to.
    """

    number: int
    source: SourceFile
    landing: PartialFile

    @property
    def paths(self) -> tuple[Path, Path]:
        """From where and to where."""
        return self.source.path, self.landing.target

    def lacks(self, extent: Extent) -> bool:
        """Return whether bytes of the file have not landed."""
        return self.landing.lacks(extent.offset)

    def copy(self, extent: Extent, moved: Moved) -> int:
        """Copy bytes; finish the file if they were the last ones.

        Args:
            extent: Extent of this file, which is part of a chunk.
            moved: Function that is called after each read and write.

        Returns:
            The bytes that were read from the source.

        Raises:
            ShardCorruptError, StagingError, OSError: As `finish`, and `SourceFile.read`.
        """
        data = thread_buffer(0 if self.landing.was_added(extent.offset) else extent.size)
        self.source.read(extent.offset, data, moved)
        is_last = self.land(extent, data)
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
        self.source.read(extent.offset, into, moved)
        return extent.size

    def land(self, extent: Extent, data: memoryview) -> bool:
        """Write bytes to LOCAL; return whether they were the file's last ones, and it is to be finished.

        Args:
            extent: Extent of this file, which is part of a chunk.
            data: Bytes of the extent.
        """
        return self.landing.write(extent.offset, data)

    def finish(self, moved: Moved) -> int:
        """Check a file of which all bytes have landed, and copy it once more where it is not what it should be.

        Args:
            moved: Function that is called after each read and write.

        Returns:
            The bytes that were read from the source.

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
                data = thread_buffer(min(landing.chunk_bytes, source.info.size_bytes - offset))
                source.read(offset, data, moved)
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


def thread_buffer(size: int) -> memoryview:
    """Return memory of this thread, which the next call uses again."""
    if size > len(getattr(_memory, "buffer", b"")) or not hasattr(_memory, "buffer"):
        _memory.buffer = mmap.mmap(-1, max(size, 1))
    return memoryview(_memory.buffer)[:size]


def opened_again(files: list[Transfer]) -> list[Transfer]:
    """Return the same files, on their way from where they are now. No thread may be at work on them."""
    again = []
    for file in files:
        file.landing.close()
        again.append(replace(file, landing=file.landing.again()))
    return again


def missing_chunks(files: list[Transfer]) -> list[Chunk]:
    """List the chunks of some files that have not landed; of small files, only those that are missing."""
    sizes, chunk_bytes = [file.source.info.size_bytes for file in files], files[0].landing.chunk_bytes
    chunks = (tuple(e for e in chunk if files[e.file].lacks(e)) for chunk in cut(sizes, chunk_bytes))
    return [chunk for chunk in chunks if chunk]


def lacking_bytes(files: list[Transfer]) -> list[int]:
    """Return how many bytes have not landed, by file."""
    sums = [0] * len(files)
    for extent in chain.from_iterable(missing_chunks(files)):
        sums[extent.file] += extent.size
    return sums
