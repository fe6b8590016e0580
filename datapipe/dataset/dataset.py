"""A packed data set, open for reading: the hot path, which all formats share."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import DecodeError, ManifestError, ShardCorruptError, ShardReadError, StagingError
from ..images.codec import decode
from ..names import Io
from .block_slots import SLOTS, BlockSlots
from .index import ENCODINGS, open_index, read_keys, sample_checksum
from .local_first import LocalFirstReader
from .manifest import Manifest
from .shard_files import Data
from .shard_reader import ShardReader, release

logger = logging.getLogger(__name__)


class DataSet:
    """A packed data set, of which any thread reads any sample's bytes with a single read.

    Args:
        folder: Folder of the data set (one split).
        io: Method by which shards are read, see ShardReader.
        retries: Number of times that an open or a read that fails is repeated, at least 0.
        local: Folder to which the data set is being copied: what has landed there is read there. Or one with slots for
            blocks.

    Attributes:
        folder, local: Folders, as given.
        manifest: Content of `manifest.json`.
        index: Records of the samples, RECORD[num_samples], memory-mapped.
        raw_shape: (height, width, channels) of every image if the stored bytes are nothing but pixels, else None.
        reader: The ShardReader.
        slots: Slots in `local` for blocks of the data set; None if that has no slots.

    Raises:
        ManifestError: `folder` does not contain a readable data set.
        SettingError: `io` or `retries` is out of range.
    """

    def __init__(self, folder: Path | str, io: Io = "cached", retries: int = 0, local: Path | None = None) -> None:
        self.folder, self.local, self._io, self._retries = Path(folder), local, io, retries
        self.manifest = Manifest.read(self.folder)
        self.index = self._open_index()
        self.raw_shape = _raw_shape(self.manifest)
        self.slots = _open_slots(local)
        if local is None or self.slots:
            self.reader = ShardReader([self.folder / shard.name for shard in self.manifest.shards], io, retries)
        else:
            self.reader = LocalFirstReader(self.folder, local, self.manifest, io, retries)
        self._keys: list[str] | None = None

    def _open_index(self) -> np.ndarray:
        if self.local is not None:
            with suppress(ManifestError):  # it is not there yet, or an earlier version's
                return open_index(self.local, self.manifest)
        return open_index(self.folder, self.manifest)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def read(self, sample: int) -> Data:
        """Read an encoded image. Raises ShardCorruptError when it is not the one that was packed."""
        record = self.index[sample]
        shard, offset, size, checksum = (int(record[field]) for field in ("shard", "offset", "size", "checksum"))
        return self.read_at(sample, shard, offset, size, checksum)

    def read_at(self, sample: int, shard: int, offset: int, size: int, checksum: int) -> Data:
        """Do what `read` does, for a caller that has the index's fields already.

        Args:
            sample: Number of the sample, for messages.
            shard: Number of the shard, as in the manifest.
            offset: Offset of the image's bytes in the shard's file.
            size: Size of the image, in bytes.
            checksum: Lower half of the bytes' xxh3-64.

        Returns:
            The encoded image, `size` bytes.

        Raises:
            ShardReadError: The bytes cannot be read.
            ShardCorruptError: These are not the sample's bytes.
        """
        try:
            data = self.reader.read(shard, offset, size)
        except ShardReadError as error:
            error.key = self.key(sample)
            raise
        return self.checked(sample, data, shard, offset, checksum)

    def checked(self, sample: int, data: Data, shard: int, offset: int, checksum: int) -> Data:
        """Compare bytes with a sample's checksum; where they came from a local copy and are wrong, read the source.

        Args:
            sample: Number of the sample, for messages.
            data: Bytes that were read.
            shard: Number of the shard.
            offset: Offset of the image's bytes in the shard's file.
            checksum: Lower half of the expected xxh3-64.

        Returns:
            The sample's bytes.

        Raises:
            ShardCorruptError: These are not the sample's bytes.
        """
        if sample_checksum(data) == checksum:
            return data
        again = (self.reader.read if self.slots else self.reader.read_again)(shard, offset, len(data))
        if self.slots:
            logger.warning("%s: sample %s was read wrong; read once more", self.folder, self.key(sample))
        if again is not None and sample_checksum(again) == checksum:
            return again
        message = f"the {len(data)} bytes at {offset} are not the ones that were packed"
        name = self.manifest.shards[shard].name
        raise ShardCorruptError(message, path=self.folder, shard=name, key=self.key(sample))

    def pixels(self, sample: int, data: Data) -> np.ndarray:
        """Decode an image that was read: uint8[height, width, channels]. Raises DecodeError."""
        try:
            if self.raw_shape:
                return np.frombuffer(data, np.uint8).reshape(self.raw_shape)
            return decode(data, self.manifest.channels)
        except ValueError as error:
            name = self.manifest.shards[self.index[sample]["shard"]].name
            raise DecodeError(str(error), path=self.folder, shard=name, key=self.key(sample)) from error

    def holds_pixels(self) -> bool:
        """Return whether all images are stored as plain pixels."""
        return all(ENCODINGS[number] in ("raw", "pnm") for number in np.unique(self.index["encoding"]))

    def key(self, sample: int) -> str:
        """Return a sample's key, for messages; its number where the keys themselves are damaged."""
        if self._keys is None:
            try:
                self._keys = read_keys(self.folder)
            except ManifestError:
                self._keys = []
        return self._keys[sample] if len(self._keys) == len(self) else f"number {sample}"

    def forget_files(self) -> None:
        """Open all files again when they are next read: a process that was forked shares its parent's."""
        self.reader.close()
        self.slots = _open_slots(self.local) if self.slots else None

    def close(self) -> None:
        """Release all files, the index's too. May be called twice."""
        index = [self.index]
        self.index = self.index[:0].copy()
        release(index)
        self.reader.close()
        if self.slots:
            self.slots.close()

    def __reduce__(self) -> tuple[type[DataSet], tuple[Path, Io, int, Path | None]]:
        """Have a copy, or the one that another process gets, open the same folder itself."""
        return DataSet, (self.folder, self._io, self._retries, self.local)

    def __enter__(self) -> DataSet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _open_slots(local: Path | None) -> BlockSlots | None:
    if local is None or not (local / SLOTS).exists():
        return None
    try:
        return BlockSlots(local)
    except StagingError as error:  # they are being removed
        logger.warning("%s; nothing is read from there", error)
        return None


def _raw_shape(manifest: Manifest) -> tuple[int, int, int] | None:
    if manifest.format != "npy" or manifest.height is None or manifest.width is None:
        return None
    return manifest.height, manifest.width, manifest.channels
