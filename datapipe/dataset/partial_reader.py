"""A shard on its way to a node's own disk: what of it has landed there is read there, and the rest from its source.

    LOCAL/NAME             the whole shard, checked
    LOCAL/.NAME.partial    until then its bytes; a chunk that has not landed yet is a hole
    LOCAL/.NAME.landed     a line with what is expected, one byte for each chunk, which is 1 when it has landed, one
                           that is 1 while the shard is being checked, and the chunks' xxh3-64 in hexadecimal. A shard
                           of a single chunk has no such map.

`staging.partial_file` writes these files. A loader that has read a whole chunk from the source may add it, so that each
byte leaves the source once. While it does, it holds a shared lock on the partial file; a process that checks the file
holds an exclusive one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from ..foreign import open_plain
from ..fsio import Descriptor
from .manifest import FileInfo

logger = logging.getLogger(__name__)

PARTIAL, LANDED = "partial", "landed"
KINDS = PARTIAL, LANDED
LOOK_S = 1.0  # how often to look whether a shard is whole, or has begun to arrive


def temporary_path(target: Path, kind: str, own_name: str = "") -> Path:
    """Return where a file is until it is whole.

    Args:
        target: Final path of the file.
        kind: Kind of the temporary file, one of KINDS.
        own_name: Text that makes the name one process's own; "" if the process has LOCAL for itself.
    """
    return target.with_name(f".{target.name}{own_name}.{kind}")


def map_head(info: FileInfo, chunk_bytes: int) -> bytes:
    """Return the line that a map of landed chunks begins with.

    Args:
        info: Size and checksum of the whole file.
        chunk_bytes: Size of a chunk.
    """
    return f"{info.xxh3_128} {info.size_bytes} {chunk_bytes}\n".encode()


def count_landed(content: bytes) -> int:
    """Return the bytes that have landed, by the content of a map. Raises ValueError for anything else."""
    head, flags = content.split(b"\n", 1)
    size, chunk_bytes = map(int, head.split()[1:])
    return min(flags[: -(-size // chunk_bytes)].count(1) * chunk_bytes, size)


def write_landed(fd: int, head_bytes: int, num_chunks: int, number: int, data: memoryview) -> None:
    """Write to a map that a chunk has landed.

    Args:
        fd: Descriptor of the map.
        head_bytes: Size of its first line.
        num_chunks: Chunks of the file.
        number: Number of the chunk.
        data: Bytes of the chunk.
    """
    checksum = xxhash.xxh3_64_hexdigest(data).encode()
    os.pwrite(fd, checksum, head_bytes + num_chunks + 1 + len(checksum) * number)
    os.pwrite(fd, b"\1", head_bytes + number)


class ArrivingShard:
    """A shard of which LOCAL has nothing, a part, or all. Thread-safe.

    Args:
        target: Path of the shard in LOCAL when it is whole.
        info: Size and checksum of the shard.
    """

    def __init__(self, target: Path, info: FileInfo) -> None:
        self.target, self.info = target, info
        self.partial = temporary_path(target, PARTIAL)
        self._map: _Map | None = None
        self._next_look = 0.0
        self._lock = threading.Lock()

    def is_whole(self) -> bool:
        """Return whether all of it is there. A change is seen within a second."""
        now = time.monotonic()
        if now < self._next_look or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next_look = now + LOOK_S
            if self.has_name():
                self._map = None
                return True
            if self._map is None or self._map.is_gone():
                self._map = None
                with suppress(OSError):
                    self._map = _Map(self.target, self.info)
        finally:
            self._lock.release()
        return False

    def has_name(self) -> bool:
        """Look whether all of it is there."""
        with suppress(OSError):
            return self.target.stat().st_size == self.info.size_bytes
        return False

    def has(self, offset: int, size: int) -> bool:
        """Return whether some bytes have landed, and can be read from `partial`."""
        landed = self._map
        return landed is not None and landed.has(offset, size)

    def wants(self, offset: int, size: int) -> bool:
        """Return whether these bytes are a chunk that has not landed, and which `add` would take."""
        landed = self._map
        return landed is not None and landed.wants(offset, size)

    def add(self, offset: int, data: memoryview) -> None:
        """Write a chunk that was read from the source, unless it has landed meanwhile, or the shard is being checked.

        Args:
            offset: Offset of the chunk in the shard's file, in bytes; the chunk is one that is wanted.
            data: Bytes of the chunk.
        """
        landed = self._map
        if landed is None:
            return
        try:
            landed.add(offset, data)
        except OSError as error:
            logger.warning("%s: %s; what loaders read is not kept there", self.partial, error.strerror or error)
            landed.is_writable = False


class _Map(Descriptor):
    """The chunks of a partial file that have landed. Raises OSError where there is no valid one."""

    def __init__(self, target: Path, info: FileInfo) -> None:
        self._size, self._partial = info.size_bytes, temporary_path(target, PARTIAL)
        self._adding = threading.Lock()  # one chunk at a time: they come from one disk and go to one
        fd, self.is_writable = open_plain(temporary_path(target, LANDED))
        super().__init__(fd)
        head = os.pread(self.fd, 128, 0).split(b"\n")[0] + b"\n"
        match = re.fullmatch(rb"[0-9a-f]{32} [0-9]{1,20} ([1-9][0-9]{0,15})\n", head)
        if match is None or head != map_head(info, int(match[1])):
            raise OSError(0, "not a map of this file")
        self._head, self._chunk_bytes = head, int(match[1])
        self._num_chunks = -(-self._size // self._chunk_bytes)

    def is_gone(self) -> bool:
        """Return whether the file has its name, or was given up."""
        return os.fstat(self.fd).st_nlink == 0

    def has(self, offset: int, size: int) -> bool:
        first, last = offset // self._chunk_bytes, (offset + max(size, 1) - 1) // self._chunk_bytes
        return self._flags(first, last - first + 1) == b"\1" * (last - first + 1)

    def wants(self, offset: int, size: int) -> bool:
        is_chunk = offset % self._chunk_bytes == 0 and size == min(self._chunk_bytes, self._size - offset)
        return self.is_writable and is_chunk and self._is_missing(offset // self._chunk_bytes)

    def _is_missing(self, number: int) -> bool:
        """Return whether a chunk has not landed, and may be added: nobody is checking the file."""
        is_closed = self._flags(self._num_chunks, 1) != b"\0" or self.is_gone()
        return not is_closed and self._flags(number, 1) == b"\0"

    def add(self, offset: int, data: memoryview) -> None:
        number = offset // self._chunk_bytes
        with self._adding:
            fd, is_writable = open_plain(self._partial)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_same = os.pread(self.fd, len(self._head), 0) == self._head
                if is_writable and is_same and self._is_missing(number):
                    done = 0
                    while done < len(data):
                        done += os.pwrite(fd, data[done:], offset + done)
                    write_landed(self.fd, len(self._head), self._num_chunks, number, data)
            except BlockingIOError:  # it is being checked
                return
            finally:
                os.close(fd)

    def _flags(self, first: int, count: int) -> bytes:
        return os.pread(self.fd, count, len(self._head) + first)
