"""A file on its way from the source to LOCAL."""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path

from ..errors import ShardCorruptError
from ..streams import Moved
from .landing import Landing, WrongBytes
from .plan import Extent
from .source_files import SourceFile

logger = logging.getLogger(__name__)
_memory = threading.local()


@dataclass(frozen=True)
class Transfer:
    """A file on its way.

    Attributes:
        number: of its data set, among those that are copied.
        source: where it comes from.
        landing: where it goes to.
    """

    number: int
    source: SourceFile
    landing: Landing

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
            extent: of this file, a chunk's.
            moved: called after each read and write.

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
            extent: of this file, a chunk's.
            into: is filled.
            moved: called after each read.

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
            extent: of this file, a chunk's.
            data: its bytes.
        """
        return self.landing.write(extent.offset, data)

    def finish(self, moved: Moved) -> int:
        """Check a file of which all bytes have landed, and copy it once more where it is not what it should be.

        Args:
            moved: called after each read and write.

        Returns:
            The bytes that were read from the source.

        Raises:
            ShardCorruptError: The source does not have its checksum either.
            StagingError: The source was changed since it was first read.
        """
        source, landing, copied = self.source, self.landing, 0
        try:
            landing.finish(moved)
        except WrongBytes as wrong:
            logger.warning("%s: %s; copying it again", landing.target, wrong)
            source.check_unchanged()
            for offset in range(0, source.info.size_bytes, landing.chunk_bytes):
                data = thread_buffer(min(landing.chunk_bytes, source.info.size_bytes - offset))
                source.read(offset, data, moved)
                landing.write(offset, data)
                copied += len(data)
            try:
                landing.finish(moved)
            except WrongBytes as error:
                source.check_unchanged()
                raise ShardCorruptError(str(error), path=source.path.parent, shard=source.path.name) from error
        finally:
            source.close()
        return copied


def thread_buffer(size: int) -> memoryview:
    """Return memory of this thread, which the next call uses again."""
    if size > len(getattr(_memory, "buffer", b"")) or not hasattr(_memory, "buffer"):
        _memory.buffer = mmap.mmap(-1, max(size, 1))
    return memoryview(_memory.buffer)[:size]
