"""Read shards from a node's own disk, as far as they have landed there, and from their source until then."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import ShardReadError
from ..foreign import open_plain
from ..names import Io
from .manifest import MANIFEST, Manifest
from .partial_reader import LOOK_S, ArrivingShard
from .shard_files import Data, File
from .shard_reader import SLACK, Read, ShardReader, allow_open_files, release

logger = logging.getLogger(__name__)


class LocalFirstReader(ShardReader):
    """Reads parts of shards that are being copied. What cannot be read from the copy is read from the source.

    Args:
        source: Folder of the data set.
        local: Folder of its copy.
        manifest: Manifest of the data set.
        io: Method by which whole shards are read, see ShardReader.
        retries: Number of times that an open or a read of the source that fails is repeated, at least 0.
    """

    def __init__(self, source: Path, local: Path, manifest: Manifest, io: Io = "cached", retries: int = 0) -> None:
        self._local, self._infos = local, manifest.shards
        super().__init__([source / shard.name for shard in manifest.shards], io, retries)
        self._copy = ShardReader([shard.partial for shard in self._arriving], io)
        allow_open_files(3 * len(self._arriving))  # each may have its source, its copy, and a map open

    def _begin(self) -> None:
        super()._begin()
        self._arriving = [ArrivingShard(self._local / shard.name, shard) for shard in self._infos]
        self._is_whole = [False] * len(self._infos)
        self._is_given_up = [False] * len(self._infos)  # until it is whole
        self._is_lost = [False] * len(self._infos)  # for good
        self._manifest_fd, self._next_look = -1, 0.0

    def read(self, shard: int, offset: int, size: int, into: memoryview | None = None) -> Data:
        """Read bytes of a shard, from the copy if they have landed.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
            into: Memory to read into, as for `ShardReader.read`.

        Returns:
            Exactly `size` bytes.

        Raises:
            ShardReadError: The bytes cannot be read from the source.
        """
        while self._is_there(shard, offset, size):
            was_whole = self._is_whole[shard]
            try:
                return self._copy.read(shard, offset, size, into)
            except ShardReadError as error:
                if was_whole or not self._take_name(shard):  # which it may have got at this moment
                    self._give_up(shard, error.message)
        return super().read(shard, offset, size, into)

    def file_for(self, shard: int, offset: int, size: int) -> File | None:
        """Return the open file from which `read` would take some bytes: the copy, if they have landed there.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
        """
        if self._is_there(shard, offset, size):
            return self._copy.file_for(shard, offset, size)
        return super().file_for(shard, offset, size)

    def read_again(self, shard: int, offset: int, size: int) -> Data | None:
        """Read bytes that were wrong once more, from the source.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.

        Returns:
            The bytes.

        Raises:
            ShardReadError: They cannot be read.
        """
        if self._is_there(shard, offset, size):
            self._give_up(shard, f"the {size} bytes at {offset} are not the ones that were packed")
        return super().read(shard, offset, size)  # also if another sample of what was read at once has led to that

    def _is_there(self, shard: int, offset: int, size: int) -> bool:
        """Return whether to read some bytes from the copy."""
        if self._is_whole[shard]:
            if self._manifest_fd < 0 and time.monotonic() > self._next_look:
                self._hold()
            return True
        arriving = self._arriving[shard]
        if self._is_lost[shard]:
            return False
        if arriving.is_whole():
            return self._take_name(shard)
        return not self._is_given_up[shard] and arriving.has(offset, size)

    def _take_name(self, shard: int) -> bool:
        """Read a shard by its final name from now on, and not from its source; return whether it has that name."""
        arriving = self._arriving[shard]
        if not arriving.has_name():
            return False
        copy, source = self._copy._shards[shard], self._shards[shard]
        files, copy.file, source.file = [copy.file, source.file], None, None
        copy.path, self._is_whole[shard] = arriving.target, True
        release(files)
        return True

    def _hold(self) -> None:
        """Hold the copy, once it is a data set, so that nobody removes it to make room."""
        self._next_look = time.monotonic() + LOOK_S
        with suppress(OSError):
            fd, _ = open_plain(self._local / MANIFEST)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise
            self._manifest_fd = fd

    def _give_up(self, shard: int, problem: str) -> None:
        """Read a shard from its source; what has landed until it gets its name, or for good, if it has it."""
        self._is_lost[shard] = self._is_whole[shard]
        self._is_whole[shard], self._is_given_up[shard] = False, True
        logger.warning("%s: %s; it is read from %s", self._local / self._infos[shard].name, problem, self._paths[shard])

    def extent_to_read(self, shard: int, start: int, stop: int, block_bytes: int) -> tuple[int, int]:
        """Say what to read, to have samples of a block: all of the block, if that is a chunk which the copy lacks.

        Args:
            shard: Number of the shard.
            start: Offset of the samples' first byte in the shard's file.
            stop: Offset of the byte behind their last one.
            block_bytes: Size of the cells in which the block's samples begin, in bytes.

        Returns:
            The first byte, and the one behind the last.
        """
        arriving, cell = self._arriving[shard], start // block_bytes * block_bytes
        cell_stop = min(cell + block_bytes, arriving.info.size_bytes)
        is_nearly_all = start - cell + max(0, cell_stop - stop) <= block_bytes // SLACK
        is_there = self._is_there(shard, start, stop - start)
        if is_there or not is_nearly_all or not arriving.wants(cell, cell_stop - cell):
            return start, stop
        return cell, max(stop, cell_stop)

    def keep_block(self, shard: int, start: int, parts: Sequence[Data], block_bytes: int) -> None:
        """Add a block to the copy, where that lacks it and has such chunks.

        Args:
            shard: Number of the shard.
            start: Offset of the first byte in the shard's file, as `extent_to_read` gave it.
            parts: Bytes that were read, one part behind the other.
            block_bytes: Size of the cells in which the block's samples begin, in bytes.
        """
        arriving = self._arriving[shard]
        size = min(block_bytes, arriving.info.size_bytes - start)
        if start % block_bytes == 0 and arriving.wants(start, size) and sum(map(len, parts)) >= size:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            arriving.add(start, memoryview(data)[:size])

    def will_read(self, shard: int, offset: int, size: int) -> None:
        """Let the kernel read ahead, where the bytes will be read.

        Args:
            shard: Number of the shard.
            offset: Offset of the bytes in the shard's file, in bytes.
            size: Number of bytes.
        """
        if self._is_there(shard, offset, size):
            self._copy.will_read(shard, offset, size)
        else:
            super().will_read(shard, offset, size)

    def oldest(self) -> Read | None:
        """Do what `ShardReader.oldest` does, of all reads."""
        reads = [read for read in (super().oldest(), self._copy.oldest()) if read is not None]
        return min(reads, default=None, key=lambda read: read.since)

    def close(self) -> None:
        """Do what `ShardReader.close` does."""
        if self._manifest_fd >= 0:
            os.close(self._manifest_fd)
        super().close()
        self._copy.close()
