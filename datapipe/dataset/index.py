"""The sample index: where each sample's bytes lie, and what the loader must know before reading them."""

from __future__ import annotations

import re
import struct
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from ..errors import ManifestError
from ..foreign import open_regular, read_regular
from ..fsio import atomic_write, checksum_of
from ..images import Buffer
from .manifest import INDEX, KEYS, Manifest

# 32 bytes per sample: ImageNet's 1.28 million are 41 MB, shared between processes by the page cache.
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
pack_record = struct.Struct("<Q4I4H").pack  # one sample's, as bytes, which the garbage collector skips
_PART = 1 << 14  # records checked at a time: half a megabyte stays in the processor's cache
KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")  # a name in tar and zip, and never one that leaves a folder
ENCODINGS = ("jpeg", "png", "pnm", "pnm+lz4", "pnm+zstd", "raw")  # raw: only pixels, in npy shards


def sample_checksum(data: Buffer) -> int:
    """Return the checksum that the index keeps of a sample: the lower half of its bytes' xxh3-64."""
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def write_index(folder: Path, records: np.ndarray) -> None:
    """Write RECORD[num_samples] as `index.npy`, which `numpy.load` reads anywhere."""
    with atomic_write(folder / INDEX) as file:
        np.save(file, records)


def open_index(folder: Path, manifest: Manifest) -> np.ndarray:
    """Map the index read-only: RECORD[num_samples].

    Its checksum is compared (ImageNet's 41 MB take 10 ms from the page cache), since a flipped byte in the index could
    be a wrong label. Its records are compared with the manifest, see `check_records`. Raises ManifestError.
    """
    path = Path(folder) / INDEX
    expected = next((file.xxh3_128 for file in manifest.files if file.name == INDEX), None)
    try:
        # once: a shared filesystem takes milliseconds to open a file
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            if checksum_of(file) != expected:
                raise ManifestError("does not have the checksum that the manifest gives", path=path)
            records = _map_records(file)
    except ManifestError:
        raise
    except Exception as error:  # numpy has Python parse the file's header, which may end in any error
        raise ManifestError(f"cannot be read: {error}", path=path) from error
    if records.dtype != RECORD or records.shape != (manifest.num_samples,):
        raise ManifestError(
            f"holds {records.dtype} of shape {records.shape}, expected {manifest.num_samples} records", path=path
        )
    check_records(records, manifest, path)
    return records


def _map_records(file: FileIO) -> np.ndarray:
    """Map what `numpy.save` has written to an open file. Raises any error where it has not."""
    file.seek(0)
    read_header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
    shape, _, dtype = read_header(file)
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape)


def check_records(records: np.ndarray, manifest: Manifest, path: Path) -> None:
    """Compare an index with its manifest.

    Label, shard, place in the shard, width, height and encoding of each sample are checked, and how many samples each
    shard has. ImageNet's 1.28 million records take 13 ms.

    Args:
        records: Index, RECORD[num_samples].
        manifest: Manifest of the same data set.
        path: Path of the index, for messages.

    Raises:
        ManifestError: They contradict each other; names the first bad sample and its field.
    """
    bounds, records = _bounds(manifest), np.asarray(records)  # slices of a memmap cost more than these comparisons
    sizes = np.array([shard.size_bytes for shard in manifest.shards], np.uint64)
    counts = np.zeros(len(sizes), np.int64)
    for first in range(0, len(records), _PART):
        part = records[first : first + _PART]
        problem = _first_out_of_bounds(part, bounds) or _first_out_of_shard(part, sizes)
        if problem:
            number, field, allowed = problem
            raise ManifestError(f"sample {first + number}: {field} is {part[number][field]}, {allowed}", path=path)
        counts += np.bincount(part["shard"], minlength=len(sizes))
    for shard, count in zip(manifest.shards, counts.tolist(), strict=True):
        if count != shard.num_samples:
            raise ManifestError(f"has {count} samples in {shard.name}, expected {shard.num_samples}", path=path)


def _bounds(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest value of fields of a record."""
    width, height, raw = manifest.width, manifest.height, ENCODINGS.index("raw")
    bounds = {
        "label": (0, manifest.num_classes - 1),
        "shard": (0, len(manifest.shards) - 1),
        "size": (1, 0xFFFFFFFF),
        "width": (width, width) if width else (1, 0xFFFF),
        "height": (height, height) if height else (1, 0xFFFF),
        "encoding": (0, raw - 1),
    }
    if manifest.format == "npy":
        pixels = (width or 0) * (height or 0) * manifest.channels
        bounds |= {"size": (pixels, pixels), "encoding": (raw, raw)}
    return bounds


def _first_out_of_bounds(records: np.ndarray, bounds: dict[str, tuple[int, int]]) -> tuple[int, str, str] | None:
    problems = []
    for field, (low, high) in bounds.items():
        values = records[field]
        if int(values.max()) > high or (low > 0 and int(values.min()) < low):
            number = int(((values < low) | (values > high)).argmax())
            problems.append((number, field, f"expected {low} to {high}" if low != high else f"expected {low}"))
    return min(problems, default=None)


def _first_out_of_shard(records: np.ndarray, sizes: np.ndarray) -> tuple[int, str, str] | None:
    """Return the first record whose bytes do not lie within its shard. `sizes`: uint64[num_shards], in bytes."""
    offsets, limits = records["offset"], sizes[records["shard"]]
    is_inside = (offsets <= limits) & (records["size"] <= limits - offsets)  # offset + size may pass 64 bits
    if is_inside.all():
        return None
    number = int(is_inside.argmin())
    size, limit = records["size"][number], limits[number]
    return number, "offset", f"and its {size} bytes end beyond the {limit} of its shard"


def write_keys(folder: Path, keys: list[str]) -> None:
    """Write every sample's key, in the order of the index, one per line."""
    with atomic_write(folder / KEYS) as file:
        file.write("".join(f"{key}\n" for key in keys).encode())


def read_keys(folder: Path) -> list[str]:
    """Read every sample's key, in the order of the index. For messages and tools: loading does not need them."""
    try:
        return read_regular(Path(folder) / KEYS).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot be read: {error}", path=Path(folder) / KEYS) from error


def read_checked_keys(folder: Path, manifest: Manifest) -> list[str]:
    """Read the keys of a data set, and check that there is one per sample, each as `pack` makes them (see KEY).

    Raises ManifestError when these are not the keys of the data set.
    """
    keys, path = read_keys(folder), Path(folder) / KEYS
    if len(keys) != manifest.num_samples:
        raise ManifestError(f"holds {len(keys)} keys, expected {manifest.num_samples}", path=path)
    seen = set()
    for number, key in enumerate(keys):
        if key in seen or not KEY.fullmatch(key):
            problem = "has been there before" if key in seen else "is not a key: letters, digits, _ and -, between /"
            raise ManifestError(f"line {number + 1}, {key[:80]!r}, {problem}", path=path)
        seen.add(key)
    return keys
