"""Raw data sets: one file each, and one line in `datapipe/names.py`.

A source module has

    detect(path)               the kind it finds there, or None, from names alone
    load(path, kind, outside)  a Source
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import SettingError, SourceError
from ..images import Buffer
from ..images.codec import encode_png
from ..names import KINDS

MODULES = tuple(dict.fromkeys(KINDS.values()))  # in the order in which `auto` asks them
# The classes of samples by the names that saved plans have for them: nothing is imported by a name from a file.
SAMPLES = {
    "files": ("files", "Files"),
    "slices": ("archive_members", "Slices"),
    "rows": ("parquet", "Rows"),
    "pixels": ("", "Pixels"),
    "packed": ("packed", "Packed"),
}
# A split by its folder's name or the name the data set's authors gave it.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val", "t10k": "val"}


class Samples(Protocol):
    """The samples of one split: a dataclass whose fields are `str`, `list[str]`, arrays and None (see `plan`).

    Read from many threads at once.
    """

    names: Sequence[str]  # path of each in the source, without extension: what keys are made of
    labels: np.ndarray  # uint32[N]
    blocks: np.ndarray | None  # int64[N]: what can only be read in one piece with others; None: each by itself

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Where sample `i` is, for messages."""

    def size_bytes(self, i: int) -> int:
        """Of the encoded image; may cost an access to the disk."""

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """The encoded image, in the beginning of `buffer` if it fits there, else in memory of its own.

        Raises OSError, and ValueError for what is there but is no image to be read (a path that leaves the source).
        """

    def close(self) -> None:
        """Release open files. Reading opens them again."""


@dataclass(frozen=True)
class Source:
    """`ordered`: packed already, so that its order is to be kept, and the samples' names are their keys."""

    kind: str
    classes: list[str]
    splits: dict[str, Samples]
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
    """Pixels named by their place in the source."""
    return Pixels(origin, [f"{i:05d}" for i in range(len(labels))], labels.astype(np.uint32), pixels)


def open_source(path: Path, kind: str = "auto", outside: bool = False) -> Source:
    """Look at a raw data set and list its samples. Raises SourceError, SettingError.

    `outside`: follow links and paths that lead out of `path`; else what they name is no image to be read.
    """
    path = Path(path).absolute()  # a saved plan is read from other working directories, too
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
    """The class of samples that is registered under `name`. Raises ValueError when none is."""
    if name not in SAMPLES:
        raise ValueError(f"{name!r} is not a kind of samples")
    module, kind = SAMPLES[name]
    return getattr(_module(module), kind)


def samples_name(samples: Samples) -> str:
    """The name under which the class of `samples` is registered."""
    kind = type(samples)
    module = kind.__module__.removeprefix(__name__).lstrip(".")
    return next(name for name, place in SAMPLES.items() if place == (module, kind.__name__))


def _module(name: str):
    return importlib.import_module(f".{name}", __name__)
