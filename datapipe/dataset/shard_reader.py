"""Reading bytes from shards: in any number of threads, repeated when a filesystem fails, and watched."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import clock, watched
from ..checks import check_name, checked_int
from ..errors import DatapipeError
from ..names import IOS, Io
from .shard_files import Data, DirectFile, File, MappedFile, RepeatedFile

_CLOSE_S = 0.5  # how long to wait for files to be closed
SLACK = 16  # one of so many parts of a block may be read in addition, to have whole chunks
_SPARE_FILES = 256  # descriptors for everything else


class Read(NamedTuple):
    """A read that is under way."""

    since: float  # clock.now()
    path: Path
    offset: int
    problem: str  # why it is about to be repeated; empty while it has not failed


class _ChunkRead(NamedTuple):
    """Reads that code that is not Python does one after the other."""

    since: float  # clock.now() when it began
    paths: list[Path | None]
    offsets: list[int]
    progress: np.ndarray  # native.PROGRESS

    def current(self) -> list[Read]:
        """Return the read that is under way; nothing if there is none."""
        number, since_ns = self.progress.tolist()
        path = self.paths[number - 1] if number else None
        return [Read(self.since + 1e-9 * since_ns, path, self.offsets[number - 1], "")] if path else []


class ShardReader:
    """Reads parts of shards. Thread-safe. A shard is opened when it is first read.

    Args:
        paths: Paths of the shards, by number.
        io: Method of reading: "cached" (pread through the page cache); "mmap" (without a copy, but a shard that is
            truncated while it is mapped ends the process, and a filesystem that hangs stops all of its threads);
            "direct" (past the page cache, which is left to others).
        retries: Number of times that an open or a read that fails, or a read that falls short, is repeated, at least 0.
            Each time the shard is opened again, after a pause of 0.1 s, 0.2 s, 0.4 s and so on.

    Raises:
        SettingError: `io` or `retries` is out of range.
    """

    def __init__(self, paths: list[Path], io: Io = "cached", retries: int = 0) -> None:
        check_name("io", io, IOS)
        self._paths, self._retries = paths, checked_int("retries", retries, 0)
        self._kind = {"cached": File, "mmap": MappedFile, "direct": DirectFile}[io]
        self._begin()
        allow_open_files(len(paths))

    def _begin(self) -> None:
        """Start with no shard open and with new locks: after a fork, a thread of the parent may hold the old ones."""
        self._closed = threading.Event()
        self._shards = [RepeatedFile(path, self._kind) for path in self._paths]
        self._under_way: dict[int, tuple[float, int, int, str]] = {}
        self._chunks: dict[int, _ChunkRead] = {}  # by thread, as those under way

    def read(self, shard: int, offset: int, size: int, into: memoryview | None = None) -> Data:
        """Read bytes of a shard.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
            into: Memory to read into: page-aligned and of `room_for(size)` bytes. Not with `io` "mmap".

        Returns:
            Exactly `size` bytes; a view of `into` if that is given.

        Raises:
            ShardReadError: The bytes cannot be read; names path and offset.
        """
        thread, since, under_way = threading.get_ident(), clock.now(), self._under_way
        under_way[thread] = since, shard, offset, ""

        def note(problem: str) -> None:
            under_way[thread] = since, shard, offset, problem

        try:
            return self._shards[shard].read(offset, size, into, self._retries, self._closed.wait, note)
        finally:
            del under_way[thread]

    def file_for(self, shard: int, offset: int, size: int) -> File | None:
        """Return the open file from which `read` would take some bytes; None where `read` has to open it first.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
        """
        return self._shards[shard].file

    @contextmanager
    def watch_chunk(self, files: list[File | None], offsets: list[int], progress: np.ndarray) -> Iterator[None]:
        """Have `oldest` tell of reads that code that is not Python does one after the other, in this thread.

        Args:
            files: Open file of each read, from `file_for`; kept open until the end of the context.
            offsets: First byte of each read in its file.
            progress: Array of `native.PROGRESS` numbers, which tell the read that is under way.

        Yields:
            Once: the reads are to be done in the body of `with`.
        """
        thread, chunks = threading.get_ident(), self._chunks
        chunks[thread] = _ChunkRead(clock.now(), [file.path if file else None for file in files], offsets, progress)
        try:
            yield
        finally:
            del chunks[thread]

    def will_read(self, shard: int, offset: int, size: int) -> None:
        """Let the kernel read ahead (posix_fadvise(2)). Does nothing for a shard that has not been read yet.

        This may take as long as a read: some filesystems ask their server first.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
        """
        file = self._shards[shard].file
        if file is not None and file.hints:
            with suppress(OSError):
                os.posix_fadvise(file.fd, offset, size, os.POSIX_FADV_WILLNEED)

    def read_again(self, shard: int, offset: int, size: int) -> Data | None:
        """Read bytes that were wrong from elsewhere.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.

        Returns:
            The bytes; None if there is nowhere else.
        """
        return None

    def extent_to_read(self, shard: int, start: int, stop: int, block_bytes: int) -> tuple[int, int]:
        """Say what to read, to have samples of a block.

        Args:
            shard: Number of the shard.
            start: Offset of the samples' first byte in the shard's file.
            stop: Offset of the byte behind their last one.
            block_bytes: Size of the cells in which the block's samples begin, in bytes.

        Returns:
            The first byte, and the one behind the last: as given, or at most `block_bytes // SLACK` bytes more.
        """
        return start, stop

    def keep_block(self, shard: int, start: int, parts: Sequence[Data], block_bytes: int) -> None:
        """Keep what was read, if it is of use.

        Args:
            shard: Number of the shard.
            start: Offset of the first byte in the shard's file, as `extent_to_read` gave it.
            parts: Bytes that were read, one part behind the other.
            block_bytes: Size of the cells in which the block's samples begin, in bytes.
        """

    def oldest(self) -> Read | None:
        """Return the read that began first among those under way; None if there is none."""
        under_way = list(self._under_way.values())
        reads = [Read(since, self._paths[shard], offset, problem) for since, shard, offset, problem in under_way]
        reads += [read for chunk in list(self._chunks.values()) for read in chunk.current()]
        return min(reads, default=None, key=attrgetter("since"))

    def close(self) -> None:
        """Release all files and end the pauses before retries. May be called twice; a later read opens files again.

        A file that is being read is closed by the thread that reads it. This waits for no lock, since the thread that
        holds it may hang in a system call.
        """
        files = []
        for shard in self._shards:
            files.append(shard.file)
            shard.file = None
        self._closed.set()
        self._begin()
        release(files)


def release(things: list[Any]) -> None:
    """Empty a list of things that close with their last reference, such as files and memory maps.

    Closing hangs, too, on a filesystem that does not answer. So a thread does it, for which this waits only a moment.
    """
    try:
        watched.call(things.clear, _CLOSE_S, "files", "closing")
    except DatapipeError:  # it hangs
        return
    except RuntimeError:  # the interpreter goes down, and starts no more threads
        things.clear()


def allow_open_files(count: int) -> None:
    """Raise the limit of open files: each shard keeps a descriptor, and 1,024, the usual limit, may be too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
