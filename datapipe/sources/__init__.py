"""Raw data sets: one file and one line here each.

A source module has

    detect(path)      the kind it finds there, or None, from names alone
    load(path, kind)  a Source
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import SettingError, SourceError
from ..image import encode_png

# In the order in which `auto` asks them: an ImageFolder is whatever is nothing else.
MODULES = ("idx", "cifar", "imagefolder")
KINDS = {"imagefolder": "imagefolder", "cifar10": "cifar", "cifar100": "cifar", "idx": "idx"}
# A split by its folder's name or the name the data set's authors gave it.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val", "t10k": "val"}


class Samples(Protocol):
    """The samples of one split, or of one shard of it. Sent to worker processes, so small and picklable."""

    names: Sequence[str]  # path of each in the source, without extension: what keys are made of
    labels: np.ndarray  # uint32[N]

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Where sample `i` is, for messages."""

    def size_bytes(self, i: int) -> int:
        """Of the encoded image; may cost an access to the disk."""

    def read(self, i: int) -> bytes:
        """The encoded image."""

    def select(self, which: np.ndarray) -> Samples:
        """The samples with the given numbers (int[M]), in that order."""


@dataclass(frozen=True)
class Source:
    kind: str
    classes: list[str]
    splits: dict[str, Samples]


@dataclass(frozen=True)
class Pixels:
    """Samples held in memory as uint8[N, H, W] or [N, H, W, 3], to be packed as PNG."""

    origin: str
    names: Sequence[str]
    labels: np.ndarray
    pixels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        return f"{self.origin}, image {self.names[i]}"

    def size_bytes(self, i: int) -> int:
        return len(self.read(i))

    def read(self, i: int) -> bytes:
        return encode_png(self.pixels[i])

    def select(self, which: np.ndarray) -> Pixels:
        return Pixels(self.origin, [self.names[i] for i in which], self.labels[which], self.pixels[which])


def numbered(origin: str, labels: np.ndarray, pixels: np.ndarray) -> Pixels:
    """Pixels named by their place in the source."""
    return Pixels(origin, [f"{i:05d}" for i in range(len(labels))], labels.astype(np.uint32), pixels)


def open_source(path: Path, kind: str = "auto") -> Source:
    """Look at a raw data set and list its samples. Raises SourceError, SettingError."""
    path = Path(path)
    if kind != "auto" and kind not in KINDS:
        raise SettingError(f"kind: {kind!r} is not one of auto, {', '.join(KINDS)}")
    if not path.exists():
        raise SourceError("does not exist", path=path)
    if kind == "auto":
        kind, module = next((kind, m) for m in map(_module, MODULES) if (kind := m.detect(path)))
    else:
        module = _module(KINDS[kind])
    source = module.load(path, kind)
    for name, samples in source.splits.items():
        if not len(samples):
            raise SourceError(f"split {name} holds no images", path=path)
    return source


def _module(name: str):
    return importlib.import_module(f".{name}", __name__)
