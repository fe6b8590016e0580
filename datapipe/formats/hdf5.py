"""HDF5 shards: `bytes` uint8[total] (contiguous), `offsets` uint64[N+1], `labels` uint32[N], `keys`.

Image `i` is bytes[offsets[i] : offsets[i+1]]. Because `bytes` is contiguous (HDF5 File Format Specification, IV.A.2.i,
"Data Layout Message"), each image lies in one piece in the file, at the dataset's own file offset plus offsets[i].

HDF5 needs the size of a contiguous dataset when it is created, but the images are written as they come. That works
because `bytes`, created first in a new file, begins at the same place whatever its size: the images go there. In the
end h5py creates the rest of the file, for that size, in memory and without the images.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished

SUFFIX = ".h5"
OVERHEAD_BYTES = 64


class Writer:
    """Lays out an HDF5 shard."""

    def __init__(self) -> None:
        self.head = bytes(_first_place())
        self._keys: list[str] = []
        self._labels: list[int] = []
        self._sizes: list[int] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        self._keys.append(key)
        self._labels.append(label)
        self._sizes.append(len(data))
        return (data,)

    def finish(self) -> Finished:
        import h5py

        offsets = np.zeros(len(self._sizes) + 1, np.uint64)
        np.cumsum(self._sizes, out=offsets[1:])
        total, begin = int(offsets[-1]), len(self.head)
        around = _FileAround(begin, total)
        with h5py.File(around, "w") as file:
            place = _create_bytes(file, total).get_offset()
            assert place == begin or not total, f"HDF5 puts {total} bytes at {place}, one byte at {begin}"
            file["offsets"] = offsets
            file["labels"] = np.array(self._labels, np.uint32)
            file["keys"] = np.array(self._keys, dtype="S")
        content = around.getvalue()
        return Finished(content[begin:], {0: content[:begin]}, (begin + offsets[:-1]).tolist(), {})


class _FileAround(io.BytesIO):
    """A file in memory, without its `size` bytes from `begin` on, which must not be read or written."""

    def __init__(self, begin: int, size: int) -> None:
        super().__init__()
        self._begin, self._size = begin, size

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        place = super().seek(self._kept_position(position) if whence == os.SEEK_SET else position, whence)
        return place if place < self._begin else place + self._size

    def truncate(self, size: int | None = None, /) -> int:
        assert size is not None, "HDF5 says how long the file is to be"
        super().truncate(self._kept_position(size))
        return size

    def _kept_position(self, position: int) -> int:
        """Return where the byte at `position` is among those that are kept in memory."""
        if position < self._begin:
            return position
        assert position >= self._begin + self._size, f"HDF5 wants to touch the images, at {position}"
        return position - self._size


@cache
def _first_place() -> int:
    """Return where in the file the dataset `bytes` begins."""
    import h5py

    with h5py.File(io.BytesIO(), "w") as file:
        return _create_bytes(file, 1).get_offset()


def _create_bytes(file, total: int):
    """Create the dataset `bytes`, with its place in the file and no content: an h5py.h5d.DatasetID."""
    import h5py

    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # the same input gives the same bytes
    return h5py.h5d.create(file.id, b"bytes", h5py.h5t.STD_U8LE, h5py.h5s.create_simple((total,)), dcpl=layout)


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through h5py."""
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        data, offsets = file["bytes"], file["offsets"][:].tolist()
        labels, keys = file["labels"][:].tolist(), file["keys"][:]
        for i, label in enumerate(labels):
            yield keys[i].decode(), data[offsets[i] : offsets[i + 1]].tobytes(), label
