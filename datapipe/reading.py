"""Reading bytes out of shards: from any number of threads, tried again when a filesystem fails, and watched."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import SettingError, ShardReadError

logger = logging.getLogger(__name__)

Io = Literal["cached", "mmap", "direct"]
IOS = ("cached", "mmap", "direct")
ALIGNMENT = 4096  # of O_DIRECT: no disk in use asks for more (open(2))
FIRST_WAIT_S = 0.1  # before the first retry; doubled before each further one
SPARE_FILES = 256  # descriptors for all else

Data = bytes | memoryview


class Read(NamedTuple):
    """A read that is under way."""

    since: float  # time.monotonic()
    path: Path
    offset: int


class ShardReader:
    """Reads parts of shards. Thread-safe.

    `io`: "cached" (pread), "mmap" (without a copy; but a shard that is cut short while it is mapped ends the process)
    or "direct" (past the page cache, which is left to others). A shard is opened when it is first read. A read that
    fails or falls short is tried `retries` times again, with the shard opened anew.
    """

    def __init__(self, paths: list[Path], io: Io = "cached", retries: int = 0) -> None:
        if io not in IOS:
            raise SettingError(f"io: {io!r} is not one of {', '.join(IOS)}")
        if not isinstance(retries, int) or retries < 0:
            raise SettingError(f"retries: {retries!r} is out of range; allowed: whole numbers from 0")
        self._paths, self._retries = paths, retries
        self._kind = {"cached": _File, "mmap": _Map, "direct": _Direct}[io]
        self._lock = threading.Lock()
        self._files: list[_File | None] = [None] * len(paths)
        self._under_way: dict[int, tuple[float, int, int]] = {}
        _allow_open_files(len(paths))

    def read(self, shard: int, offset: int, size: int, into: memoryview | None = None) -> Data:
        """The bytes are put `into` memory, if any is given: on whole pages, and of `room_for(size)` bytes. Not with
        `io` "mmap".

        Raises ShardReadError, naming path and offset, when the bytes cannot be had.
        """
        thread = threading.get_ident()
        self._under_way[thread] = time.monotonic(), shard, offset
        try:
            file = self._files[shard]
            for attempt in range(self._retries + 1):
                try:
                    if file is None:
                        file = self._open(shard)
                    data = file.read(offset, size, into)
                    if len(data) == size:
                        return data
                    problem = f"truncated: {size} bytes at {offset} end after {len(data)}"
                except FileNotFoundError:
                    problem = f"is missing, and with it {size} bytes at {offset}"
                except OSError as error:
                    problem = f"{size} bytes at {offset} cannot be read: {error.strerror} (errno {error.errno})"
                if attempt < self._retries:
                    logger.warning("%s: %s; trying again", self._paths[shard], problem)
                    time.sleep(FIRST_WAIT_S * 2**attempt)
                    file = self._drop(shard, file)
        finally:
            del self._under_way[thread]
        tried = f" (tried {self._retries + 1} times)" if self._retries else ""
        raise ShardReadError(problem + tried, path=self._paths[shard].parent, shard=self._paths[shard].name)

    def will_read(self, shard: int, offset: int, size: int) -> None:
        """Tell the kernel: it may read ahead (posix_fadvise(2)). Nothing for shards that were not read yet."""
        file = self._files[shard]
        if file is not None and file.hints:
            with suppress(OSError):
                os.posix_fadvise(file.fd, offset, size, os.POSIX_FADV_WILLNEED)

    def oldest(self) -> Read | None:
        """Of the reads that are under way, the one that began first."""
        reads = list(self._under_way.values())
        if not reads:
            return None
        since, shard, offset = min(reads)
        return Read(since, self._paths[shard], offset)

    def close(self) -> None:
        """Release all files. May be called twice; reading opens them again."""
        with self._lock:
            files = [file for file in self._files if file]
            self._files = [None] * len(self._files)
        for file in files:
            file.close()

    def _open(self, shard: int) -> _File:
        with self._lock:
            if self._files[shard] is None:
                self._files[shard] = self._kind(self._paths[shard])
            return self._files[shard]

    def _drop(self, shard: int, file: _File | None) -> None:
        """Have the shard opened anew (ESTALE lasts as long as the descriptor), unless another thread did it.

        The file is closed when the last thread that reads it has let go of it.
        """
        with self._lock:
            if file is not None and self._files[shard] is file:
                self._files[shard] = None


class _File:
    flags = os.O_RDONLY | os.O_CLOEXEC
    hints = True
    fd = -1

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, self.flags)

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        if into is not None:
            done = 0
            while done < size and (count := os.preadv(self.fd, [into[done:size]], offset + done)):
                done += count
            return into[:done]
        data = os.pread(self.fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(self.fd, size - len(data), offset + len(data))):
            data += more  # a read may return less than was asked for before the end of the file
        return data

    def close(self) -> None:
        """May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # of a reader that nobody closed
        self.close()


class _Map(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._view = memoryview(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:  # ValueError: an empty file
            super().close()
            raise error if isinstance(error, OSError) else OSError(0, "an empty file") from error

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        return self._view[offset : offset + size]

    def close(self) -> None:
        super().close()
        self._view = memoryview(b"")  # the map goes with the last view


class _Direct(_File):
    flags = _File.flags | os.O_DIRECT
    hints = False

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning("%s: its filesystem has no O_DIRECT, reading through the page cache", path)
            self.fd = os.open(path, _File.flags)

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


def room_for(size: int) -> int:
    """Bytes of memory to read that many into: `io` "direct" reads whole pages, from the first to the last."""
    return (-(-size // ALIGNMENT) + 1) * ALIGNMENT


def _allow_open_files(count: int) -> None:
    """One descriptor stays open a shard; the usual soft limit of 1,024 is below some data sets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
