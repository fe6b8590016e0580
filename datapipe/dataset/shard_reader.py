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
from typing import NamedTuple

from ..errors import SettingError, ShardReadError
from ..names import IOS, Io

logger = logging.getLogger(__name__)

ALIGNMENT = 4096  # of O_DIRECT: no disk in use asks for more (open(2))
FIRST_WAIT_S = 0.1  # before the first retry; doubled before each further one
CLOSE_S = 0.5  # how long closing files is waited for
SPARE_FILES = 256  # descriptors for all else

Data = bytes | memoryview


class Read(NamedTuple):
    """A read that is under way."""

    since: float  # time.monotonic()
    path: Path
    offset: int
    problem: str  # why it is about to be tried again; empty while it has not failed


class ShardReader:
    """Reads parts of shards. Thread-safe.

    `io`: "cached" (pread), "mmap" (without a copy; but a shard that is cut short while it is mapped ends the process,
    and a filesystem that hangs stops it as a whole) or "direct" (past the page cache, which is left to others). A shard
    is opened when it is first read. An open or a read that fails, or a read that falls short, is tried `retries` times
    again, with the shard opened once more, after pauses of 0.1 s, 0.2 s, 0.4 s and so on.
    """

    def __init__(self, paths: list[Path], io: Io = "cached", retries: int = 0) -> None:
        if io not in IOS:
            raise SettingError(f"io: {io!r} is not one of {', '.join(IOS)}")
        if not isinstance(retries, int) or retries < 0:
            raise SettingError(f"retries: {retries!r} is out of range; allowed: whole numbers from 0")
        self._paths, self._retries = paths, retries
        self._kind = {"cached": _File, "mmap": _Map, "direct": _Direct}[io]
        self._begin()
        _allow_open_files(len(paths))

    def _begin(self) -> None:
        """Start with no shard open, and with locks that nobody holds, also not a thread before a fork."""
        self._closed = threading.Event()
        self._shards = [_Shard(path, self._kind, self._closed) for path in self._paths]
        self._under_way: dict[int, tuple[float, int, int, str]] = {}

    def read(self, shard: int, offset: int, size: int, into: memoryview | None = None) -> Data:
        """The bytes are put `into` memory, if any is given: on whole pages, and of `room_for(size)` bytes. Not with
        `io` "mmap".

        Raises ShardReadError, naming path and offset, when the bytes cannot be had.
        """
        thread, since, under_way, its = threading.get_ident(), time.monotonic(), self._under_way, self._shards[shard]
        under_way[thread] = since, shard, offset, ""
        failed = 0
        try:
            while True:
                file = its.file
                try:
                    if file is None:
                        file = its.open()
                    data = file.read(offset, size, into)
                    if len(data) == size:
                        return data
                    problem = f"truncated: {size} bytes at {offset} end after {len(data)}"
                except FileNotFoundError:
                    problem = f"is missing, and with it {size} bytes at {offset}"
                except OSError as error:
                    problem = f"{size} bytes at {offset} cannot be read: {error.strerror} (errno {error.errno})"
                its.drop(file)
                file = None
                failed += 1
                under_way[thread] = since, shard, offset, problem
                if failed > self._retries or its.pause(problem, failed, self._retries + 1):
                    break
        finally:
            file = None  # an error's traceback keeps this frame, and would keep the file open
            del under_way[thread]
        tried = f" (tried {failed} times)" if failed > 1 else ""
        raise ShardReadError(problem + tried, path=its.path.parent, shard=its.path.name)

    def will_read(self, shard: int, offset: int, size: int) -> None:
        """Tell the kernel: it may read ahead (posix_fadvise(2)). Nothing for shards that were not read yet.

        May take as long as a read: some filesystems ask their server first.
        """
        file = self._shards[shard].file
        if file is not None and file.hints:
            with suppress(OSError):
                os.posix_fadvise(file.fd, offset, size, os.POSIX_FADV_WILLNEED)

    def oldest(self) -> Read | None:
        """Of the reads that are under way, the one that began first."""
        reads = list(self._under_way.values())
        if not reads:
            return None
        since, shard, offset, problem = min(reads)
        return Read(since, self._paths[shard], offset, problem)

    def close(self) -> None:
        """Release all files, and end the pauses before further tries. May be called twice; reading opens files again.

        A file that is being read is closed by the thread that reads it. No lock is waited for, since the thread that
        holds it may hang in a system call.
        """
        files = []
        for shard in self._shards:
            files.append(shard.file)
            shard.file = None
        self._closed.set()
        self._begin()
        release(files)


class _Shard:
    """A shard that is opened once, by the first thread that needs it, while the others wait."""

    def __init__(self, path: Path, kind: type[_File], closed: threading.Event) -> None:
        self.path, self._kind, self._closed = path, kind, closed
        self.file: _File | None = None
        self._opening = threading.Lock()  # held while the system opens: only `open` may wait for it
        self._quiet_until = 0.0

    def open(self) -> _File:
        with self._opening:
            file = self.file
            if file is None:
                file = self.file = self._kind(self.path)
            return file

    def drop(self, file: _File | None) -> None:
        """Have the shard opened once more (ESTALE lasts as long as the descriptor), unless another thread did it.

        The file is closed when the last thread that reads it has let go of it. No lock: should another thread open the
        shard between these two lines, it is opened once more than needed.
        """
        if self.file is file:
            self.file = None

    def pause(self, problem: str, failed: int, tries: int) -> bool:
        """Wait before the next try. Returns whether the reader was closed meanwhile.

        Of all threads that fail on this shard, one logs it, until its pause is over.
        """
        pause_s = FIRST_WAIT_S * 2 ** (failed - 1)
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + pause_s
            logger.warning("%s: %s; try %d of %d, trying again in %g s", self.path, problem, failed, tries, pause_s)
        return self._closed.wait(pause_s)


def release(things: list) -> None:
    """Empty a list of what is closed with the last reference to it, such as files and maps of them.

    A filesystem that does not answer hangs who closes a file, too: a thread does it, and is waited for only a moment.
    """
    closing = threading.Thread(target=things.clear, name="datapipe-close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # the interpreter goes down, and starts no more threads
        things.clear()
    else:
        closing.join(CLOSE_S)


class _File:
    """An open file, closed when nothing refers to it any more: never under a thread that reads it."""

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

    def __del__(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # nothing was written
                os.close(self.fd)


class _Map(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._view = memoryview(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ))  # it goes with the last view of it
        except ValueError as error:
            raise OSError(0, "an empty file") from error

    def read(self, offset: int, size: int, into: memoryview | None) -> Data:
        return self._view[offset : offset + size]


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
