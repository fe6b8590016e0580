"""A packed data set, open for reading: the one hot path of all formats."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import numpy as np

from .errors import DecodeError, ManifestError, ShardCorruptError
from .image import decode
from .index import open_index, read_keys, sample_checksum
from .manifest import Manifest


class DataSet:
    """Reads any sample's bytes with one `pread`, from any number of threads.

    Attributes: `folder`, `manifest`, `index` (RECORD[num_samples], memory-mapped), `raw_shape` (of images whose bytes
    are nothing but pixels, else None). Raises ManifestError when there is no readable data set in `folder`.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.index = open_index(self.folder, self.manifest)
        of = self.manifest
        self.raw_shape = (of.height, of.width, of.channels) if of.format == "npy" else None
        self._fds: list[int | None] = [None] * len(self.manifest.shards)
        self._opening = threading.Lock()
        self._keys: list[str] | None = None
        _allow_open_files(len(self._fds))

    def __len__(self) -> int:
        return self.manifest.num_samples

    def read(self, sample: int) -> bytes:
        """The encoded image. Raises ShardCorruptError when it is not the one that was packed."""
        record = self.index[sample]
        place = (int(record[field]) for field in ("shard", "offset", "size", "checksum"))
        return self.read_at(sample, *place)

    def read_at(self, sample: int, shard: int, offset: int, size: int, checksum: int) -> bytes:
        """Like `read`, for a caller that has the index's fields at hand."""
        fd = self._fds[shard]
        if fd is None:
            fd = self._open(shard)
        data = os.pread(fd, size, offset)
        if len(data) < size:
            data += self._read_on(fd, size - len(data), offset + len(data))
        if len(data) != size:
            raise self._corrupt(sample, shard, f"truncated: {size} bytes at {offset} end after {len(data)}")
        if sample_checksum(data) != checksum:
            raise self._corrupt(sample, shard, f"the {size} bytes at {offset} are not the ones that were packed")
        return data

    def pixels(self, sample: int, data: bytes) -> np.ndarray:
        """The decoded image, uint8[height, width, channels]. Raises DecodeError."""
        try:
            if self.raw_shape:
                return np.frombuffer(data, np.uint8).reshape(self.raw_shape)
            return decode(data, self.manifest.channels)
        except ValueError as error:
            name = self.manifest.shards[self.index[sample]["shard"]].name
            raise DecodeError(str(error), path=self.folder, shard=name, key=self.key(sample)) from error

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
        self.index = self.index[:0].copy()
        with self._opening:
            for i, fd in enumerate(self._fds):
                if fd is not None:
                    os.close(fd)
                self._fds[i] = None

    def __enter__(self) -> DataSet:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def _open(self, shard: int) -> int:
        with self._opening:
            if self._fds[shard] is None:
                path = self.folder / self.manifest.shards[shard].name
                try:
                    self._fds[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError as error:
                    raise ShardCorruptError("is missing", path=self.folder, shard=path.name) from error
            return self._fds[shard]

    def _read_on(self, fd: int, size: int, offset: int) -> bytes:
        """A read may return less than asked for before the end of the file."""
        parts = b""
        while len(parts) < size and (part := os.pread(fd, size - len(parts), offset + len(parts))):
            parts += part
        return parts

    def _corrupt(self, sample: int, shard: int, message: str) -> ShardCorruptError:
        name = self.manifest.shards[shard].name
        return ShardCorruptError(message, path=self.folder, shard=name, key=self.key(sample))


def _allow_open_files(count: int) -> None:
    """One descriptor stays open a shard; the usual soft limit of 1,024 is below some data sets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
