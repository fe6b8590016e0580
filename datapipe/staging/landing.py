"""A file on its way to the local disk: written in chunks, in any order, by any thread; resumable; checked at the end.

`dataset.arriving` describes the files that it consists of meanwhile. Where LOCAL's filesystem has no locks, several
processes may copy the same file at the same time. Then the temporary names have a part of their own for each process,
and nothing of another process's is continued.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..dataset.arriving import LANDED, PARTIAL, map_head, temporary_path
from ..dataset.manifest import FileInfo
from ..foreign import READ, open_own, open_regular
from ..fsio import checksum, named
from ..streams import Moved

logger = logging.getLogger(__name__)

# A longer write gets larger pieces of memory for the page cache, which a virtual machine may first have to be given.
WRITE_BYTES = 256 << 10


class WrongBytes(ValueError):
    """A file that has landed does not have its checksum."""


class Landing:
    """A file that lands in chunks. Thread-safe, except that a chunk is written by one thread.

    Args:
        target: the file's final path.
        info: its size and checksum.
        chunk_bytes: size of its chunks.
        is_whole: whether the file is in place already, with its checksum.
        own_name: distinguishes the temporary files of this process; "" where it has LOCAL for itself.
    """

    def __init__(self, target: Path, info: FileInfo, chunk_bytes: int, is_whole: bool, own_name: str = "") -> None:
        self.target, self.info, self.chunk_bytes = target, info, chunk_bytes
        self.is_whole, self._own_name = is_whole, own_name
        self._partial, self._landed = (temporary_path(target, kind, own_name) for kind in (PARTIAL, LANDED))
        self._lock = threading.Lock()
        self._fd = self._map_fd = -1
        self._num_chunks = max(1, -(-info.size_bytes // chunk_bytes))
        self._head = map_head(info, chunk_bytes)
        self._missing: set[int] = set()
        self._was_wrong = False  # perhaps by what a loader had read
        if not is_whole:
            # If all have landed, it was killed before it gave the file its name: one more write leads to that.
            missing = self._read_map()
            self._missing = {*range(self._num_chunks)} if missing is None else missing or {self._num_chunks - 1}

    def _read_map(self) -> set[int] | None:
        """Return the chunks that have not landed yet; None where there is no map of this file."""
        with suppress(OSError):
            size = os.lstat(self._partial).st_size
            content = _read_own(self._landed)
            flags = content[len(self._head) :]
            if content.startswith(self._head) and len(flags) == self._num_chunks + 1 and size == self.info.size_bytes:
                return {number for number, flag in enumerate(flags[: self._num_chunks]) if flag != 1}
        return None

    def lacks(self, offset: int) -> bool:
        """Return whether the chunk that begins at `offset` has not landed."""
        return offset // self.chunk_bytes in self._missing

    def open(self) -> None:
        """Open the temporary files, empty unless chunks have landed."""
        with self._lock:
            if self._fd >= 0 or self.is_whole:
                return
            is_new = self._read_map() is None
            if is_new and os.path.lexists(self._landed):
                logger.info("%s: what has landed has other chunks, or is damaged: beginning it again", self.target)
            with named(self._partial):
                self._fd = open_own(self._partial)
                if is_new:
                    os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, self.info.size_bytes)
            if self._num_chunks > 1:
                with named(self._landed):
                    self._map_fd = open_own(self._landed)
                    if is_new:
                        os.ftruncate(self._map_fd, 0)
                        os.pwrite(self._map_fd, self._head + bytes(self._num_chunks), 0)
                    self._mark(self._num_chunks, b"\1" if self._was_wrong else b"\0")  # 0: loaders may add to it

    def was_added(self, offset: int) -> bool:
        """Return whether a loader has added the chunk that begins at `offset`, which was missing."""
        self.open()
        return self._map_fd >= 0 and os.pread(self._map_fd, 1, len(self._head) + offset // self.chunk_bytes) == b"\1"

    def write(self, offset: int, data: memoryview) -> bool:
        """Write a chunk; return whether it was the last one.

        Args:
            offset: in the file, a multiple of the chunks' size.
            data: the chunk's bytes; none if it is there.
        """
        self.open()
        with named(self._partial):
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + WRITE_BYTES], offset + done)
        number = offset // self.chunk_bytes
        with self._lock:
            was_missing = number in self._missing
            self._missing.discard(number)
            self._mark(number, b"\1")
            return was_missing and not self._missing

    def _mark(self, number: int, flag: bytes) -> None:
        if self._map_fd >= 0:
            with named(self._landed):
                os.pwrite(self._map_fd, flag, len(self._head) + number)

    def read(self, offset: int, into: memoryview) -> bool:
        """Read bytes that have landed, for another node; return whether they are there."""
        for path in (self._partial, self.target):  # it may get its name meanwhile
            with suppress(FileNotFoundError), open(path, "rb", buffering=0, opener=open_regular) as file:
                return os.preadv(file.fileno(), [into], offset) == len(into)
        return False

    def finish(self, moved: Moved) -> None:
        """Compare what lies on the disk with the checksum, and give the file its name.

        Args:
            moved: called after each read and write.

        Raises:
            WrongBytes: it has another checksum. It is forgotten, and may be copied again.
        """
        self.open()
        self._mark(self._num_chunks, b"\1")  # from here on, loaders add nothing
        moved(self._partial)
        with named(self._partial), self._without_loaders():
            try:
                os.fsync(self._fd)
            except OSError:
                self.forget()  # an error is told once: the next fsync would succeed, over what the disk does not hold
                raise
            moved()
            actual = checksum(self._partial, moved)
            size = os.fstat(self._fd).st_size
        if (actual, size) != (self.info.xxh3_128, self.info.size_bytes):
            self.forget()
            self._was_wrong = True
            raise WrongBytes(f"xxh3-128 is {actual}, expected {self.info.xxh3_128}")
        os.replace(self._partial, self.target)
        self.is_whole = True
        self._landed.unlink(missing_ok=True)
        self.close()

    @contextmanager
    def _without_loaders(self) -> Iterator[None]:
        """Wait for loaders that are adding a chunk. Where there are no locks, they add nothing anyway."""
        fd = self._fd
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)

    def forget(self) -> None:
        """Remove what has landed."""
        self.close()
        for path in (self._landed, self._partial):  # a map without its file counts for nothing
            path.unlink(missing_ok=True)
        self._missing = {*range(self._num_chunks)}

    def again(self) -> Landing:
        """Return the same file, as what of it has landed shows."""
        return Landing(self.target, self.info, self.chunk_bytes, self.is_whole, self._own_name)

    def close(self) -> None:
        """Close the temporary files, which stay. May be called twice."""
        with self._lock:
            for fd in (self._fd, self._map_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._map_fd = -1


def make_own_name() -> str:
    """Return what makes temporary names this process's own."""
    return f".{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"


def is_of_dead_process(path: Path) -> bool:
    """Return whether a temporary file is the own one of a process on this host that has ended."""
    match = re.fullmatch(r"\..+\.([0-9]+)\.[0-9a-f]{32}", path.stem)
    return bool(match and f".{socket.gethostname()}." in path.name and not Path("/proc", match[1]).exists())


def _read_own(path: Path) -> bytes:
    fd = os.open(path, READ)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        return file.read() if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() else b""
