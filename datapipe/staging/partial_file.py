"""A file on its way to the local disk: written in chunks, in any order, by any thread; resumable; checked at the end.

`dataset.partial_reader` describes the files that it consists of until then. If LOCAL's filesystem has no locks, several
processes may copy the same file at the same time. Then the temporary names have a part of their own for each process,
and nothing of another process's is continued.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import xxhash

from ..dataset.manifest import FileInfo
from ..dataset.partial_reader import LANDED, PARTIAL, map_head, temporary_path, write_landed
from ..errors import StagingError
from ..foreign import open_own, open_regular, read_own
from ..fsio import checksum, named
from ..watched import Moved

logger = logging.getLogger(__name__)

# A longer write gets larger pieces of memory for the page cache, which a virtual machine may first have to be given.
_WRITE_BYTES = 256 << 10
_SUM_BYTES = 16  # of a chunk's checksum in the map


class WrongBytes(ValueError):
    """A file that has landed does not have its checksum."""


class PartialFile:
    """A file that lands in chunks. Thread-safe, except that a chunk is written by one thread.

    Args:
        target: Final path of the file.
        info: Size and checksum of the file.
        chunk_bytes: Size of its chunks.
        is_whole: Whether the file is in place already, with its checksum.
        own_name: Word that distinguishes the temporary files of this process; "" if it has LOCAL for itself.
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
        self.look_again()

    def look_again(self) -> None:
        """Find out what has landed. No thread may be at work on the file."""
        self.close()
        if not self.is_whole:
            # If all have landed, the process was killed before the file got its name. The last chunk then counts as
            # missing, and an empty write of it leads to `finish`.
            missing = self._read_map()
            self._missing = {*range(self._num_chunks)} if missing is None else missing or {self._num_chunks - 1}

    def _read_map(self) -> set[int] | None:
        """Return the chunks that have not landed yet; None where there is no map of this file."""
        with suppress(OSError, StagingError):  # there is none, or it is a link, or another user's
            size = os.lstat(self._partial).st_size
            content = read_own(self._landed)
            flags = content[len(self._head) :]
            is_map = content.startswith(self._head) and len(flags) == self._num_chunks * (1 + _SUM_BYTES) + 1
            if is_map and size == self.info.size_bytes:
                return {number for number, flag in enumerate(flags[: self._num_chunks]) if flag != 1}
        return None

    def drop_wrong(self, moved: Moved) -> None:
        """Compare the chunks that have landed with their checksums; those that differ are missing again.

        A power cut can leave zeros where the map, which reached the disk earlier, says that a chunk has landed.
        """
        landed = {*range(self._num_chunks)} - self._missing
        if self.is_whole or self._num_chunks == 1 or not landed:
            return
        self.open()
        sums = os.pread(self._map_fd, _SUM_BYTES * self._num_chunks, len(self._head) + self._num_chunks + 1)
        room = memoryview(bytearray(self.chunk_bytes))
        for number in sorted(landed):
            data = room[: self._size_of(number)]
            is_there = os.preadv(self._fd, [data], number * self.chunk_bytes) == len(data)
            moved()
            expected = sums[_SUM_BYTES * number : _SUM_BYTES * (number + 1)]
            if not is_there or xxhash.xxh3_64_hexdigest(data).encode() != expected:
                logger.warning("%s: the disk does not hold what was written at %d", self._partial, number * len(room))
                self._missing.add(number)
                self._mark(number, b"\0")
        self.close()

    def lacks(self, offset: int) -> bool:
        """Return whether the chunk that begins at `offset` has not landed."""
        return offset // self.chunk_bytes in self._missing

    @property
    def missing_bytes(self) -> int:
        """Size of the chunks that have not landed."""
        return sum(map(self._size_of, self._missing))

    def _size_of(self, number: int) -> int:
        return min(self.chunk_bytes, self.info.size_bytes - number * self.chunk_bytes)

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
                        os.ftruncate(self._map_fd, len(self._head) + (_SUM_BYTES + 1) * self._num_chunks + 1)
                    self._mark(self._num_chunks, b"\1" if self._was_wrong else b"\0")  # 0: loaders may add to it

    def was_added(self, offset: int) -> bool:
        """Return whether a loader has added the chunk that begins at `offset`, which was missing."""
        self.open()
        return self._map_fd >= 0 and os.pread(self._map_fd, 1, len(self._head) + offset // self.chunk_bytes) == b"\1"

    def write(self, offset: int, data: memoryview) -> bool:
        """Write a chunk that begins at `offset` (no bytes if it is there); return whether it was the last one."""
        self.open()
        with named(self._partial):
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + _WRITE_BYTES], offset + done)
        number = offset // self.chunk_bytes
        with self._lock:
            was_missing = number in self._missing
            self._missing.discard(number)
            if self._map_fd >= 0 and data:
                with named(self._landed):
                    write_landed(self._map_fd, len(self._head), self._num_chunks, number, data)
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
        """Compare what lies on the disk with the checksum, and give the file its name. It is closed, also by an error.

        Raises:
            WrongBytes: It has another checksum. It is forgotten, and may be copied again.
        """
        self.open()
        try:
            self._check(moved)
            os.replace(self._partial, self.target)
            self.is_whole = True
            self._landed.unlink(missing_ok=True)
        finally:
            self.close()  # whatever has ended it: the next to copy this file would wait for the lock

    def _check(self, moved: Moved) -> None:
        self._mark(self._num_chunks, b"\1")  # from here on, loaders add nothing
        moved(self._partial)
        with named(self._partial):
            with suppress(OSError):  # without locks, loaders add nothing anyway
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # waits for those that are adding a chunk; until it is closed
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

    def forget(self) -> None:
        """Remove what has landed."""
        self.close()
        for path in (self._landed, self._partial):  # a map without its file counts for nothing
            path.unlink(missing_ok=True)
        self._missing = {*range(self._num_chunks)}

    def close(self) -> None:
        """Close the temporary files, which stay. May be called twice."""
        with self._lock:
            for fd in (self._fd, self._map_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._map_fd = -1

    def __del__(self) -> None:  # of a copy that has ended with an error
        self.close()
