"""The ways to read an open shard, and how that is repeated when a filesystem fails."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import ShardReadError
from ..fsio import Descriptor

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1  # before the first retry; doubled before each further one
ALIGNMENT = 4096  # of O_DIRECT: no disk in use asks for more (open(2))

Data = bytes | memoryview
NOWHERE = 0, -1, False  # what `File.locate` returns of bytes that only `read` can give


def room_for(size: int) -> int:
    """Return how many bytes of memory a read of `size` bytes may fill: `io` "direct" reads whole pages."""
    return (-(-size // ALIGNMENT) + 1) * ALIGNMENT


class File(Descriptor):
    """An open file."""

    flags = os.O_RDONLY | os.O_CLOEXEC
    hints = True

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(os.open(path, self.flags))

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


class RepeatedFile:
    """A file that is opened once, by the first thread that needs it, while the others wait; and again after a failure.

    Args:
        path: Path of the file.
        kind: Way to read it.
    """

    def __init__(self, path: Path, kind: type[File] = File) -> None:
        self.path, self._kind = path, kind
        self.file: File | None = None
        self._opening = threading.Lock()  # held while the system opens: only `open` may wait for it
        self._quiet_until = 0.0

    def open(self) -> File:
        """Return the open file. Raises OSError."""
        with self._opening:
            file = self.file
            if file is None:
                file = self.file = self.open_again()
            return file

    def open_again(self) -> File:
        """Open the file. Raises OSError."""
        return self._kind(self.path)

    def read(
        self,
        offset: int,
        size: int,
        into: memoryview | None,
        retries: int,
        wait: Callable[[float], bool | None],
        note: Callable[[str], None] = lambda _: None,
    ) -> Data:
        """Read bytes. When that fails, or falls short, open the file again and repeat it after a pause.

        Args:
            offset: Offset of the bytes in the file, in bytes.
            size: Number of bytes.
            into: Memory to read into, as for `ShardReader.read`.
            retries: Number of times that it is repeated, at least 0.
            wait: Function that waits for some seconds; if it returns True, the read is not repeated.
            note: Function that is told why the read is about to be repeated.

        Returns:
            Exactly `size` bytes.

        Raises:
            ShardReadError: The bytes cannot be read; names path and offset.
        """
        failed = 0
        try:
            while True:
                file = self.file
                try:
                    if file is None:
                        file = self.open()
                    data = file.read(offset, size, into)
                    if len(data) == size:
                        return data
                    problem = f"truncated: {size} bytes at {offset} end after {len(data)}"
                except FileNotFoundError:
                    problem = f"is missing, and with it {size} bytes at {offset}"
                except OSError as error:
                    problem = f"{size} bytes at {offset} cannot be read: {error.strerror} (errno {error.errno})"
                self._drop(file)
                file = None
                failed += 1
                note(problem)
                if failed > retries or wait(self._pause_after(problem, failed, retries + 1)):
                    break
        finally:
            file = None  # an error's traceback keeps this frame, and would keep the file open
        tried = f" (tried {failed} times)" if failed > 1 else ""
        raise ShardReadError(problem + tried, path=self.path.parent, shard=self.path.name)

    def _drop(self, file: File | None) -> None:
        """Make the next read open the file again (ESTALE lasts as long as the descriptor), unless it was reopened.

        The file is closed when the last thread that reads it has dropped it. This needs no lock: should another thread
        open it between these two lines, it is opened once more than necessary.
        """
        if self.file is file:
            self.file = None

    def _pause_after(self, problem: str, failed: int, tries: int) -> float:
        """Return the seconds until the next try.

        When many threads fail on this file, the first logs it and the others are silent until its pause is over.
        """
        pause_s: float = FIRST_WAIT_S * 2 ** (failed - 1)
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + pause_s
            logger.warning("%s: %s; try %d of %d, trying again in %g s", self.path, problem, failed, tries, pause_s)
        return pause_s
