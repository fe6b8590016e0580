"""Samples that lie in archives: each is a slice of a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..images import Buffer
from .paths import FLAGS, Descriptors, own_memory, read_at
from .tar_listing import Member


@dataclass(eq=False)
class Slices:
    """Samples that are `size[i]` bytes at `offset[i]` of `files[file[i]]`."""

    files: list[str]
    file: np.ndarray  # int32[N]
    offset: np.ndarray  # int64[N]
    size: np.ndarray  # int64[N]
    names: list[str]
    labels: np.ndarray
    blocks: None = None
    _descriptors: Descriptors = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._descriptors = Descriptors(len(self.files), lambda number: os.open(self.files[number], FLAGS))

    def __len__(self) -> int:
        return len(self.names)

    def where(self, i: int) -> str:
        return f"{self.files[self.file[i]]}, member {self.names[i]}"

    def size_bytes(self, i: int) -> int:
        return int(self.size[i])

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """One read from a descriptor that stays open."""
        size, number = int(self.size[i]), self.file[i]
        data = buffer[:size] if size <= len(buffer) else own_memory(size)
        fd = self._descriptors.kept[number]
        if fd is not None:
            count = read_at(fd, data, int(self.offset[i]))
        else:
            with self._descriptors.borrow(number) as fd:
                count = read_at(fd, data, int(self.offset[i]))
        if count < size:
            raise ValueError(f"is truncated: the archive ends after {count} of its {size} bytes")
        return data

    def close(self) -> None:
        self._descriptors.close()


class Part(NamedTuple):
    """Samples in one archive, as it was listed."""

    file: int
    names: list[str]
    offset: np.ndarray  # int64
    size: np.ndarray  # int64

    @classmethod
    def of(cls, file: int, names: list[str], members: Sequence[Member]) -> Part:
        offsets, sizes = ([member[column] for member in members] for column in (1, 2))
        return cls(file, names, np.array(offsets, np.int64), np.array(sizes, np.int64))


def join(files: list[str], parts: Sequence[Part], labels: np.ndarray) -> Slices:
    """The samples of all parts, one after the other; labels: uint32[N]."""
    file = np.repeat(np.array([part.file for part in parts], np.int32), [len(part.names) for part in parts])
    offset, size = (np.concatenate([np.zeros(0, np.int64), *column]) for column in list(zip(*parts, strict=True))[2:])
    return Slices(files, file, offset, size, [name for part in parts for name in part.names], labels)
