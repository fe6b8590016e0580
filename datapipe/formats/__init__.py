"""Shard formats: one file each, and one line in `datapipe/names.py`.

A format module has

    SUFFIX          of a shard's file name
    OVERHEAD_BYTES  what a sample costs beside its image, for planning shard sizes
    Writer()        a ShardWriter
    read(path)      yields (key, image bytes, label) of every sample, through a standard reader

A writer lays a shard out and touches no file: it says which bytes come next, so that any thread can write
them at their place. The loader needs neither writer nor reader: the writer says where each image's bytes lie in the
file, and that is where they are read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

from ..images import Buffer
from ..images.codec import ImageHeader

__all__ = ["Finished", "ShardWriter", "shard_format"]


class Finished(NamedTuple):
    tail: bytes  # what comes last in the file
    patches: dict[int, bytes]  # what goes over bytes written before: position and content
    offsets: Sequence[int]  # of each image's bytes in the shard's file, in the order of `add`
    sidecars: dict[str, bytes]  # files that belong beside the shard: suffix and content


class ShardWriter(Protocol):
    head: bytes  # what the file begins with

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        """The next pieces of the file for one more sample, `data` itself among them, uncopied, where it goes now.

        `key` is unique in the shard. Called for one sample after another, in the shard's order. `data` may
        change once the pieces are written: a writer that keeps it for `finish` copies it. Raises ValueError for an
        image that the format cannot hold.
        """

    def finish(self) -> Finished:
        """Called once, after the last `add`."""


def shard_format(name: str) -> ModuleType:
    """Import the module of a format, one of `names.FORMATS`."""
    return importlib.import_module(f".{name}", __name__)
