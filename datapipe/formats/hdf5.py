"""HDF5 shards: `bytes` uint8[total] (contiguous), `offsets` uint64[N+1], `labels` uint32[N], `keys`.

Image `i` is bytes[offsets[i] : offsets[i+1]]. Because `bytes` is contiguous, each image lies in one
piece in the file, at the dataset's own file offset plus offsets[i].
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import Finished

SUFFIX = ".h5"
OVERHEAD_BYTES = 64
# IOV_MAX of Linux (limits.h): the most buffers of one pwritev call.
MAX_BUFFERS = 1024


class Writer:
    """Holds the shard in memory until `finish`: a contiguous dataset's size must be known at its creation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._images: list[bytes] = []
        self._keys: list[str] = []
        self._labels: list[int] = []

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        self._images.append(data)
        self._keys.append(key)
        self._labels.append(label)

    def finish(self) -> Finished:
        import h5py

        offsets = np.zeros(len(self._images) + 1, np.uint64)
        np.cumsum([len(image) for image in self._images], out=offsets[1:])
        # No lock: nobody else knows the temporary name, and some shared filesystems have none to give.
        with h5py.File(self._path, "w", locking=False) as file:
            file["offsets"] = offsets
            file["labels"] = np.array(self._labels, np.uint32)
            file["keys"] = np.array(self._keys, dtype="S")
            layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            layout.set_layout(h5py.h5d.CONTIGUOUS)
            layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            layout.set_obj_track_times(False)  # the same input gives the same bytes
            space = h5py.h5s.create_simple((int(offsets[-1]),))
            data = h5py.h5d.create(file.id, b"bytes", h5py.h5t.STD_U8LE, space, dcpl=layout)
            begin = data.get_offset()
        _write_at(self._path, begin, self._images)
        return Finished([begin + int(offset) for offset in offsets[:-1]], {})

    def close(self) -> None:
        self._images.clear()


def _write_at(path: Path, position: int, images: list[bytes]) -> None:
    """Write the images one behind another, without joining them in memory first."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for first in range(0, len(images), MAX_BUFFERS):
            group = images[first : first + MAX_BUFFERS]
            written = os.pwritev(fd, group, position)
            expected = sum(map(len, group))
            if written < expected:  # a signal or a full disk; the second raises here
                rest = b"".join(group)[written:]
                while rest:
                    count = os.pwrite(fd, rest, position + expected - len(rest))
                    rest = rest[count:]
            position += expected
    finally:
        os.close(fd)


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        data, offsets = file["bytes"], file["offsets"][:].tolist()
        labels, keys = file["labels"][:].tolist(), file["keys"][:]
        for i, label in enumerate(labels):
            yield keys[i].decode(), data[offsets[i] : offsets[i + 1]].tobytes(), label
