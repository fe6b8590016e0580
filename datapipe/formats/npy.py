"""npy shards: the pixels of equally large images as one uint8[N, H, W, C] array, which `numpy.load` maps.

Format version 1.0 (numpy.lib.format). Beside each shard lie its labels (`.labels.npy`, uint32[N]) and its keys
(`.keys.txt`, one per line).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished

SUFFIX = ".npy"
OVERHEAD_BYTES = 0
# Twice the 64 bytes that the format aligns the array to: room for any shape.
_HEAD_BYTES = 128


class Writer:
    """Lays out an npy shard, of images of the encoding "raw": height times width times channels bytes."""

    head = bytes(_HEAD_BYTES)  # replaced in `finish`, when the number of images is known

    def __init__(self) -> None:
        self._shape: tuple[int, int, int] | None = None
        self._keys: list[str] = []
        self._labels: list[int] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        encoding, width, height, channels, _ = header
        shape = height, width, channels
        if encoding != "raw":
            raise ValueError(f"an npy shard holds pixels (encoding raw), not an image of encoding {encoding}")
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            raise ValueError(
                f"{height}×{width}×{channels} pixels (height, width, channels) among images of "
                f"{'×'.join(map(str, self._shape))}: an npy shard holds one size"
            )
        if len(data) != height * width * channels:
            raise ValueError(
                f"{len(data)} bytes are not an image of {height}×{width}×{channels} (height, width, channels)"
            )
        self._keys.append(key)
        self._labels.append(label)
        return (data,)

    def finish(self) -> Finished:
        count, (height, width, channels) = len(self._keys), self._shape or (0, 0, 0)
        labels = io.BytesIO()
        np.save(labels, np.array(self._labels, np.uint32))
        sidecars = {".labels.npy": labels.getvalue(), ".keys.txt": "".join(f"{key}\n" for key in self._keys).encode()}
        offsets = [_HEAD_BYTES + i * height * width * channels for i in range(count)]
        return Finished(b"", {0: _head((count, height, width, channels))}, offsets, sidecars)


def _head(shape: tuple[int, ...]) -> bytes:
    """Build the head: magic, version, length, and a dictionary literal, padded with spaces and ended by a line feed."""
    start = b"\x93NUMPY\x01\x00" + (_HEAD_BYTES - 10).to_bytes(2, "little")
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    return start + text.encode().ljust(_HEAD_BYTES - 11) + b"\n"


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through numpy."""
    path = Path(path)
    images = np.load(path, mmap_mode="r")
    labels = np.load(path.with_suffix(".labels.npy"))
    keys = path.with_suffix(".keys.txt").read_text().splitlines()
    for key, image, label in zip(keys, images, labels.tolist(), strict=True):
        yield key, image.tobytes(), label
