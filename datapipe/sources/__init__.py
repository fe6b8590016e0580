"""Raw data sets: one file each, and one line in `datapipe/names.py`.

A source module has

    detect(path)               Return the kind of data set at a path, or None, from names alone.
    load(path, kind, outside)  List a data set: return a Source. `outside`: follow links and paths that lead out of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from ..errors import SettingError, SourceError
from ..images import Buffer
from ..images.codec import encode_png
from ..names import KINDS

MODULES = tuple(dict.fromkeys(KINDS.values()))  # in the order in which `auto` asks them
# The classes of samples, module and name, by what saved plans call them: nothing is imported by a name from a file.
SAMPLES = {
    "files": ("files", "Files"),
    "slices": ("archive_members", "ArchiveMembers"),
    "rows": ("parquet", "ParquetRows"),
    "pixels": ("", "Pixels"),
    "packed": ("packed", "PackedSamples"),
}
# A split by the name of its folder, or what the data set's authors call it.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val", "t10k": "val"}


class Samples(Protocol):
    """The samples of one split: a dataclass with fields of `str`, `list[str]`, arrays and None (see `plan_file`).

    Many threads read at the same time.
    """

    @property
    def names(self) -> Sequence[str]:
        """The path of each sample in the source, without extension: what keys are made of."""

    @property
    def labels(self) -> np.ndarray:
        """uint32[N], the class of each sample."""

    @property
    def blocks(self) -> np.ndarray | None:
        """int64[N], the block of each sample, which is read as a whole; None: each sample is read by itself."""

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Say where sample `i` is, for messages."""

    def size_bytes(self, i: int) -> int:
        """Return the size of the encoded image; may ask the filesystem."""

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """Read the encoded image into the beginning of `buffer` if it fits there, else into memory of its own.

        Raises OSError, and ValueError when what is there must not be read (a path that leaves the source, say).
        """

    def close(self) -> None:
        """Release open files. Reading opens them again."""


@dataclass(frozen=True)
class Source:
    """A raw data set, listed.

    `ordered`: it is packed already, so its order is kept, and the samples' names are their keys.
    """

    kind: str
    classes: list[str]
    splits: Mapping[str, Samples]
    ordered: bool = False


@dataclass(frozen=True)
class Pixels:
    """Samples held in memory as uint8[N, H, W] or [N, H, W, 3], to be packed as PNG."""

    origin: str
    names: list[str]
    labels: np.ndarray
    pixels: np.ndarray
    blocks: None = None

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        return f"{self.origin}, image {self.names[i]}"

    def size_bytes(self, i: int) -> int:
        return len(encode_png(self.pixels[i]))

    def read(self, i: int, buffer: memoryview) -> bytes:
        return encode_png(self.pixels[i])

    def close(self) -> None:
        pass


def numbered(origin: str, labels: np.ndarray, pixels: np.ndarray) -> Pixels:
    """Name images by their place in the source.

    Args:
        origin: The source, for messages.
        labels: Integers[N], the class of each image.
        pixels: uint8[N, H, W] or [N, H, W, 3].

    Returns:
        The samples.
    """
    return Pixels(origin, [f"{i:05d}" for i in range(len(labels))], labels.astype(np.uint32), pixels)


def open_source(path: Path, kind: str = "auto", outside: bool = False) -> Source:
    """List the samples of a raw data set.

    Args:
        path: A folder or a file.
        kind: One of `names.KINDS`, or "auto" to look.
        outside: Follow links and paths that lead out of `path`; else they are refused.

    Returns:
        The samples by split, and the classes.

    Raises:
        SourceError: There is nothing of this kind, or it cannot be read.
        SettingError: The kind does not exist.
    """
    path = Path(path).absolute()  # a saved plan may be read from another working directory
    if kind != "auto" and kind not in KINDS:
        raise SettingError(f"kind: {kind!r} is not one of auto, {', '.join(KINDS)}")
    if not path.exists():
        raise SourceError("does not exist", path=path)
    if kind == "auto":
        kind, module = next((kind, m) for m in map(_module, MODULES) if (kind := m.detect(path)))
    else:
        module = _module(KINDS[kind])
    source = module.load(path, kind, outside)
    for name, samples in source.splits.items():
        if not len(samples):
            raise SourceError(f"split {name} holds no images", path=path)
    return source


def samples_class(name: str) -> type:
    """Return the class of samples that saved plans call `name`. Raises ValueError when there is none."""
    if name not in SAMPLES:
        raise ValueError(f"{name!r} is not a kind of samples")
    module, kind = SAMPLES[name]
    return getattr(_module(module), kind)


def samples_name(samples: Samples) -> str:
    """Return what saved plans call the class of `samples`."""
    kind = type(samples)
    module = kind.__module__.removeprefix(__name__).lstrip(".")
    return next(name for name, place in SAMPLES.items() if place == (module, kind.__name__))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __name__)
