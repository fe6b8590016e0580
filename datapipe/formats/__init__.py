"""Shard formats: one file each, and one line in `datapipe/names.py`.

A format module has

    SUFFIX          The ending of a shard's file name.
    OVERHEAD_BYTES  What a sample costs beside its image, to plan the size of shards.
    Writer()        A ShardWriter.
    read(path)      Yield key, image bytes and label of every sample, through a standard reader and without the index:
                    a shard outlives this project. Only tests and users call it.

A writer lays a shard out and does not touch the file: it says which bytes come next, so that any thread can write them
at their place. Loaders need neither writer nor reader: the writer says where in the file each image's bytes lie, and
loaders read them there.
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
    """What completes a shard behind its last sample."""

    tail: bytes  # what comes last in the file
    patches: dict[int, bytes]  # what goes over bytes written before: position and content
    offsets: Sequence[int]  # of each image's bytes in the shard's file, in the order of `add`
    sidecars: dict[str, bytes]  # files that belong beside the shard: suffix and content


class ShardWriter(Protocol):
    """Lays out one shard."""

    head: bytes  # what the file begins with

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        """Lay out one more sample. Called for one after another, in the shard's order.

        Args:
            key: The sample's key, unique in the shard.
            label: Class of the sample.
            data: The encoded image. It may change once the pieces are written: a writer that keeps it for `finish`
                copies it.
            header: Header of the image.

        Returns:
            The next pieces of the file. `data` itself is one of them, unless it is written in `finish`.

        Raises:
            ValueError: The format cannot hold the image.
        """

    def finish(self) -> Finished:
        """Complete the shard. Called once, after the last `add`."""


def shard_format(name: str) -> ModuleType:
    """Import the module of a format, one of `names.FORMATS`."""
    return importlib.import_module(f".{name}", __name__)
