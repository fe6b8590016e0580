"""The ways to read an open shard."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

ALIGNMENT = 4096  # of O_DIRECT: no disk in use asks for more (open(2))

Data = bytes | memoryview
NOWHERE = 0, -1, False  # what `File.locate` returns of bytes that only `read` can give


def room_for(size: int) -> int:
    """Return how many bytes of memory a read of `size` bytes may fill: `io` "direct" reads whole pages."""
    return (-(-size // ALIGNMENT) + 1) * ALIGNMENT


class File:
    """An open file. It is closed with the last reference to it, so never while a thread reads it."""

    flags = os.O_RDONLY | os.O_CLOEXEC
    hints = True
    fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, self.flags)

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        """Read bytes; fewer only at the end of the file.

        Args:
            offset: Offset of the bytes in the file, in bytes.
            size: Number of bytes.
            into: Memory to read into; None: new memory.

        Returns:
            The bytes.

        Raises:
            OSError: They cannot be read.
        """
        if into is not None:
            done = 0
            while done < size and (count := os.preadv(self.fd, [into[done:size]], offset + done)):
                done += count
            return into[:done]
        data = os.pread(self.fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(self.fd, size - len(data), offset + len(data))):
            data += more  # a read may return less than was asked for before the end of the file
        return data

    def locate(self, offset: int, size: int) -> tuple[int, int, bool]:
        """Say where code that is not Python finds bytes, as long as this object lives.

        Args:
            offset: Offset of the bytes in the file, in bytes.
            size: Number of bytes.

        Returns:
            Their address in memory, or 0; a descriptor to read them from; and whether that needs whole pages.
        """
        return 0, self.fd, False

    def __del__(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # nothing was written
                os.close(self.fd)


class MappedFile(File):
    """A file in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._view = memoryview(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ))  # unmapped with the last view of it
        except ValueError as error:
            raise OSError(0, "an empty file") from error
        self._address = np.frombuffer(self._view, np.uint8).ctypes.data

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        return self._view[offset : offset + size]

    def locate(self, offset: int, size: int) -> tuple[int, int, bool]:
        return (self._address + offset, -1, False) if offset + size <= len(self._view) else NOWHERE


class DirectFile(File):
    """A file that is read past the page cache."""

    flags = File.flags | os.O_DIRECT
    hints = False

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning("%s: its filesystem has no O_DIRECT, reading through the page cache", path)
            self.fd = os.open(path, File.flags)

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        first = offset // ALIGNMENT * ALIGNMENT
        whole = -(-(offset + size - first) // ALIGNMENT) * ALIGNMENT
        room = memoryview(mmap.mmap(-1, whole)) if into is None else into[:whole]
        done = 0
        while done < len(room) and (count := os.preadv(self.fd, [room[done:]], first + done)):
            done += count
            if count % ALIGNMENT:  # the end of the file
                break
        return room[offset - first : min(done, offset - first + size)]

    def locate(self, offset: int, size: int) -> tuple[int, int, bool]:
        return 0, self.fd, True
