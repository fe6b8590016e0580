"""IDX files of the MNIST family: `train-images-idx3-ubyte` and `-labels-idx1-`, `t10k-…`, plain or gzipped.

The format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import zlib
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from ..errors import SourceError
from ..memory import allowed_bytes
from ..splits import VariantsError
from . import Source
from .file_names import is_hidden
from .labels import number_labels
from .listing import Listing
from .paths import open_checked
from .samples import Pixels, numbered

_IMAGES = re.compile(r".+-images[-.]idx3-ubyte(\.gz)?")
_UNSIGNED_BYTE = 0x08
_MAX_GZIP_RATIO = 1032  # deflate: 258 bytes for 2 bits


def detect(path: Path) -> str | None:
    return "idx" if path.is_dir() and _image_files(path) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    files = _image_files(path) if path.is_dir() else []
    if not files:
        raise SourceError("holds no *-images-idx3-ubyte[.gz]", path=path)
    pixels: dict[str, Pixels] = {}
    known = set(files)
    for split, names in _divide(files, path, listing).items():
        images_path = path / names[0]
        labels_path = _find_labels(images_path)
        known.add(labels_path.name)
        images, labels = _read(images_path, 3), _read(labels_path, 1)
        if len(images) != len(labels):
            raise SourceError(f"holds {len(labels)} labels for {len(images)} images", path=labels_path)
        pixels[split] = numbered(str(images_path), labels, images)
    _count_others(path, known, listing)
    texts = {split: list(map(str, samples.labels.tolist())) for split, samples in pixels.items()}
    classes, numbers = number_labels(path, texts, listing.labels)
    return Source(kind, classes, {split: replace(samples, labels=numbers[split]) for split, samples in pixels.items()})


def _divide(files: list[str], path: Path, listing: Listing) -> dict[str, list[str]]:
    """Find the file of each split. Raises SourceError if one has several."""
    advice = "say with --split train=FILE and --split val=FILE which are"
    try:
        splits = listing.divide(files, path)
    except VariantsError as error:
        splits = {split: list(chain(*its.groups.values())) for split, its in error.variants.items()}
        advice = error.choices
    for split, names in splits.items():
        if len(names) > 1:
            several = " and ".join(names)
            raise SourceError(f"holds several files of images for {split}, {several}: {advice}", path=path)
    return splits


def _image_files(folder: Path) -> list[str]:
    """Find the files of images; of a plain and a gzipped one, the plain one."""
    named = [name for name in os.listdir(folder) if _IMAGES.fullmatch(name) and not is_hidden(name)]
    names = sorted(name for name in named if not os.path.isdir(folder / name))  # Kaggle has folders of the same names
    return [name for name in names if name.removesuffix(".gz") == name or name.removesuffix(".gz") not in names]


def _count_others(folder: Path, known: set[str], listing: Listing) -> None:
    """Count what lies in the folder and is not read."""
    twins = {f"{name}.gz" for name in known} & set(os.listdir(folder))
    listing.left_out.add_all((str(folder / name) for name in twins), "beside the same file unpacked, which is read")
    listing.left_out.add_entries(folder, "beside the IDX files", known | twins)


def _find_labels(images_path: Path) -> Path:
    name = images_path.name.removesuffix(".gz").replace("-images", "-labels").replace("idx3", "idx1")
    for path in (images_path.with_name(name), images_path.with_name(f"{name}.gz")):
        if path.exists() and not path.is_dir():
            return path
    raise SourceError(f"has no labels: {name}[.gz] is missing", path=images_path)


def _read(path: Path, num_dimensions: int) -> np.ndarray:
    """Read a file into uint8 of the shape that its header gives."""
    gzipped = path.suffix == ".gz"
    with open_checked(str(path), None) as fd, open(fd, "rb", closefd=False) as plain:
        file_bytes = os.fstat(fd).st_size
        try:
            with gzip.open(plain) if gzipped else plain as file:
                return _read_array(path, file, num_dimensions, file_bytes * (_MAX_GZIP_RATIO if gzipped else 1))
        except (EOFError, zlib.error, gzip.BadGzipFile, MemoryError) as error:
            raise SourceError(f"is truncated or corrupt: {error}", path=path) from error


def _read_array(path: Path, file: io.BufferedIOBase, num_dimensions: int, max_bytes: int) -> np.ndarray:
    """Read what the header announces, and one byte more to see that nothing follows."""
    header_bytes = 4 + 4 * num_dimensions
    header = file.read(header_bytes)
    if len(header) < header_bytes or header[:4] != bytes((0, 0, _UNSIGNED_BYTE, num_dimensions)):
        raise SourceError(f"is not an IDX file of unsigned bytes in {num_dimensions} dimensions", path=path)
    shape = np.frombuffer(header, ">u4", num_dimensions, 4).tolist()
    if 0 in shape:
        raise SourceError(f"is empty: its shape is {shape}", path=path)
    expected = math.prod(shape)
    if expected > max_bytes:
        raise SourceError(f"is truncated or corrupt: its header announces {expected} bytes of pixels", path=path)
    if expected > (allowed := allowed_bytes()):
        raise SourceError(f"holds {expected} bytes, and this process may have {allowed}", path=path)
    data = file.read(expected + 1)
    if len(data) != expected:
        size = f"{len(data)} bytes" if len(data) < expected else "more bytes"
        raise SourceError(f"is truncated or corrupt: {size} of pixels, its header says {expected}", path=path)
    return np.frombuffer(data, np.uint8).reshape(shape)
