"""A packed data set, open for reading: the one hot path of all formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import DecodeError, ManifestError, ShardCorruptError, ShardReadError
from ..images.codec import decode
from ..names import Io
from .index import ENCODINGS, open_index, read_keys, sample_checksum
from .manifest import Manifest
from .shard_reader import Data, ShardReader, release


class DataSet:
    """Reads any sample's bytes with one read, from any number of threads.

    Attributes: `folder`, `manifest`, `index` (RECORD[num_samples], memory-mapped), `raw_shape` (of images whose bytes
    are nothing but pixels, else None), `reader` (a ShardReader, with `io` and `retries`). Raises ManifestError when
    there is no readable data set in `folder`.
    """

    def __init__(self, folder: Path | str, io: Io = "cached", retries: int = 0) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.index = open_index(self.folder, self.manifest)
        of = self.manifest
        self.raw_shape = (of.height, of.width, of.channels) if of.format == "npy" else None
        self.reader = ShardReader([self.folder / shard.name for shard in of.shards], io, retries)
        self._keys: list[str] | None = None

    def __len__(self) -> int:
        return self.manifest.num_samples

    def read(self, sample: int) -> Data:
        """The encoded image. Raises ShardCorruptError when it is not the one that was packed."""
        record = self.index[sample]
        place = (int(record[field]) for field in ("shard", "offset", "size", "checksum"))
        return self.read_at(sample, *place)

    def read_at(self, sample: int, shard: int, offset: int, size: int, checksum: int) -> Data:
        """Like `read`, for a caller that has the index's fields at hand."""
        try:
            data = self.reader.read(shard, offset, size)
        except ShardReadError as error:
            error.key = self.key(sample)
            raise
        self.check(sample, data, checksum)
        return data

    def check(self, sample: int, data: Data, checksum: int) -> None:
        """Raises ShardCorruptError when these are not the sample's bytes."""
        if sample_checksum(data) != checksum:
            record = self.index[sample]
            name = self.manifest.shards[record["shard"]].name
            message = f"the {len(data)} bytes at {record['offset']} are not the ones that were packed"
            raise ShardCorruptError(message, path=self.folder, shard=name, key=self.key(sample))

    def pixels(self, sample: int, data: Data) -> np.ndarray:
        """The decoded image, uint8[height, width, channels]. Raises DecodeError."""
        try:
            if self.raw_shape:
                return np.frombuffer(data, np.uint8).reshape(self.raw_shape)
            return decode(data, self.manifest.channels)
        except ValueError as error:
            name = self.manifest.shards[self.index[sample]["shard"]].name
            raise DecodeError(str(error), path=self.folder, shard=name, key=self.key(sample)) from error

    def holds_pixels(self) -> bool:
        """Are all images stored as plain pixels?"""
        return all(ENCODINGS[number] in ("raw", "pnm") for number in np.unique(self.index["encoding"]))

    def key(self, sample: int) -> str:
        """For messages; the sample's number where the keys themselves are damaged."""
        if self._keys is None:
            try:
                self._keys = read_keys(self.folder)
            except ManifestError:
                self._keys = []
        return self._keys[sample] if len(self._keys) == len(self) else f"number {sample}"

    def close(self) -> None:
        """Release all files, the index's too. May be called twice."""
        index = [self.index]
        self.index = self.index[:0].copy()
        release(index)
        self.reader.close()

    def __enter__(self) -> DataSet:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()
