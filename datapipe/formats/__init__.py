"""Shard formats: one file and one line here each.

A format module has

    SUFFIX          of a shard's file name
    OVERHEAD_BYTES  what a sample costs beside its image, for planning shard sizes
    Writer(path)    a ShardWriter
    read(path)      yields (key, image bytes, label) of every sample, through a standard reader

The loader needs none of these: a writer says where each image's bytes lie in the file, and that is
where they are read.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple, Protocol

FORMATS = ("tar", "hdf5", "lmdb")


class Finished(NamedTuple):
    offsets: list[int]  # of each image's bytes in the shard's file, in the order of `add`
    sidecars: dict[str, bytes]  # files that belong beside the shard: suffix and content


class ShardWriter(Protocol):
    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        """Append a sample. `key` is unique in the shard; `extension` is "jpg" or "png"."""

    def finish(self) -> Finished:
        """Complete the file. Called once, after the last `add`."""

    def close(self) -> None:
        """Release what is open, finished or not."""


def shard_format(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __name__)
