"""The sample index: where each sample's bytes lie, and what the loader must know before reading them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import xxhash

from .errors import ManifestError
from .fsio import atomic_write, checksum
from .manifest import INDEX, KEYS, Manifest

# 32 bytes a sample: ImageNet's 1.28 million are 41 MB, shared between processes by the page cache.
RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the image's bytes in the shard's file
        ("size", "<u4"),  # in bytes
        ("shard", "<u4"),
        ("label", "<u4"),
        ("checksum", "<u4"),  # lower half of the image's xxh3-64
        ("width", "<u2"),  # pixels
        ("height", "<u2"),
        ("restart_interval", "<u2"),  # JPEG restart interval in MCUs, 0 for none
        ("encoding", "<u2"),  # of ENCODINGS
    ]
)
pack_record = struct.Struct("<Q4I4H").pack  # the same, of one sample: bytes, which the garbage collector passes over
ENCODINGS = ("jpeg", "png", "pnm", "pnm+lz4", "pnm+zstd", "raw")  # raw: only pixels, in npy shards


def sample_checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def write_index(folder: Path, records: np.ndarray) -> None:
    """Write RECORD[num_samples] as `index.npy`, which `numpy.load` reads anywhere."""
    with atomic_write(folder / INDEX) as file:
        np.save(file, records)


def open_index(folder: Path, manifest: Manifest) -> np.ndarray:
    """The index, memory-mapped read-only: RECORD[num_samples]. Raises ManifestError.

    Its checksum is compared (ImageNet's 41 MB take 10 ms from the page cache): a flipped byte here would be a
    wrong label there.
    """
    path = Path(folder) / INDEX
    expected = next((file.xxh3_128 for file in manifest.files if file.name == INDEX), None)
    try:
        if checksum(path) != expected:
            raise ManifestError("does not have the checksum that the manifest gives", path=path)
        records = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ManifestError(f"cannot be read: {error}", path=path) from error
    if records.dtype != RECORD or records.shape != (manifest.num_samples,):
        raise ManifestError(
            f"holds {records.dtype} of shape {records.shape}, expected {manifest.num_samples} records", path=path
        )
    return records


def write_keys(folder: Path, keys: list[str]) -> None:
    with atomic_write(folder / KEYS) as file:
        file.write("".join(f"{key}\n" for key in keys).encode())


def read_keys(folder: Path) -> list[str]:
    """Every sample's key, in the index's order. For messages and tools: the loader does without."""
    try:
        return (Path(folder) / KEYS).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot be read: {error}", path=Path(folder) / KEYS) from error
