"""Read shards from a node's own disk, as far as they have landed there, and from their source until then."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import ShardReadError
from ..names import Io
from .arriving import ArrivingShard
from .manifest import Manifest
from .shard_files import Data
from .shard_reader import SLACK, Read, ShardReader, allow_open_files

logger = logging.getLogger(__name__)


class LocalFirstReader(ShardReader):
    """Reads parts of shards that are being copied. What cannot be read from the copy is read from the source.

    Args:
        source: the data set's folder.
        local: the folder of its copy.
        manifest: the data set's.
        io: how whole shards are read, see ShardReader.
        retries: of reads from the source.
    """

    def __init__(self, source: Path, local: Path, manifest: Manifest, io: Io = "cached", retries: int = 0) -> None:
        self._local, self._infos = local, manifest.shards
        super().__init__([source / shard.name for shard in manifest.shards], io, retries)
        self._whole = ShardReader([shard.target for shard in self._arriving], io)
        self._partial = ShardReader([shard.partial for shard in self._arriving])
        allow_open_files(3 * len(self._arriving))

    def _begin(self) -> None:
        super()._begin()
        self._arriving = [ArrivingShard(self._local / shard.name, shard) for shard in self._infos]
        self._is_whole = [False] * len(self._infos)
        self._is_given_up = [False] * len(self._infos)

    def read(self, shard: int, offset: int, size: int, into: memoryview | None = None) -> Data:
        """Read bytes of a shard, from the copy if they have landed.

        Args:
            shard: its number.
            offset: in the shard's file, in bytes.
            size: in bytes.
            into: memory to read into, as for `ShardReader.read`.

        Returns:
            exactly `size` bytes.

        Raises:
            ShardReadError: the bytes cannot be read from the source.
        """
        local = self._find_local(shard, offset, size)
        while local is not None:
            try:
                return local.read(shard, offset, size, into)
            except ShardReadError as error:
                if local is self._partial and self._arriving[shard].has_name():  # which it got at this moment
                    local = self._whole
                    continue
                self._give_up(shard, error.message)
                break
        return super().read(shard, offset, size, into)

    def read_again(self, shard: int, offset: int, size: int) -> Data | None:
        """Read bytes that were wrong from the source.

        Args:
            shard: its number.
            offset: in the shard's file, in bytes.
            size: in bytes.

        Returns:
            The bytes; None where they came from there.

        Raises:
            ShardReadError: they cannot be read.
        """
        if self._is_given_up[shard] or self._find_local(shard, offset, size) is None:
            return None
        self._give_up(shard, f"the {size} bytes at {offset} are not the ones that were packed")
        return super().read(shard, offset, size)

    def _find_local(self, shard: int, offset: int, size: int) -> ShardReader | None:
        if self._is_whole[shard]:
            return self._whole
        if self._is_given_up[shard]:
            return None
        arriving = self._arriving[shard]
        if arriving.is_whole():
            self._is_whole[shard] = True
            return self._whole
        return self._partial if arriving.has(offset, size) else None

    def _give_up(self, shard: int, problem: str) -> None:
        self._is_whole[shard], self._is_given_up[shard] = False, True
        logger.warning("%s: %s; it is read from %s", self._arriving[shard].target, problem, self._paths[shard].parent)

    def read_block(self, shard: int, start: int, stop: int, block_bytes: int, into: memoryview) -> tuple[int, Data]:
        """Read samples of a block, and add the block to the copy, where that lacks it and has such chunks.

        Args:
            shard: its number.
            start: their first byte in the shard's file.
            stop: the byte behind their last one.
            block_bytes: size of the cells in which the block's samples begin.
            into: memory, as for `ShardReader.read_block`.

        Returns:
            Where in the file the bytes begin that were read, and these bytes.

        Raises:
            ShardReadError: the bytes cannot be read from the source.
        """
        arriving, cell = self._arriving[shard], start // block_bytes * block_bytes
        cell_stop = min(cell + block_bytes, arriving.info.size_bytes)
        is_nearly_all = start - cell + max(0, cell_stop - stop) <= block_bytes // SLACK
        if (
            not is_nearly_all
            or self._find_local(shard, start, stop - start)
            or not arriving.wants(cell, cell_stop - cell)
        ):
            return super().read_block(shard, start, stop, block_bytes, into)
        data = super().read(shard, cell, max(stop, cell_stop) - cell, into)
        arriving.add(cell, memoryview(data)[: cell_stop - cell])
        return cell, data

    def will_read(self, shard: int, offset: int, size: int) -> None:
        """Let the kernel read ahead, where the bytes will be read.

        Args:
            shard: its number.
            offset: in the shard's file, in bytes.
            size: in bytes.
        """
        local = self._find_local(shard, offset, size)
        if local is None:
            super().will_read(shard, offset, size)
        else:
            local.will_read(shard, offset, size)

    def oldest(self) -> Read | None:
        """Do what `ShardReader.oldest` does, of all reads."""
        reads = [read for read in (super().oldest(), self._whole.oldest(), self._partial.oldest()) if read is not None]
        return min(reads, default=None, key=lambda read: read.since)

    def close(self) -> None:
        """Do what `ShardReader.close` does."""
        super().close()
        self._whole.close()
        self._partial.close()
