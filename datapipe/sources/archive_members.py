"""Samples that are members of archives: each is a range of bytes in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..formats.tar_listing import Member
from ..images import Buffer
from .paths import FLAGS, Descriptors, own_memory, read_at


@dataclass(eq=False)
class ArchiveMembers:
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
        """Read it with one request, from a descriptor that stays open."""
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

    def picked(self, samples: np.ndarray, labels: np.ndarray) -> ArchiveMembers:
        """Pick some of the samples, int64[M], with labels, uint32[M]; only their files are kept."""
        used, file = np.unique(self.file[samples], return_inverse=True)
        files = [self.files[number] for number in used.tolist()]
        names = [self.names[i] for i in samples.tolist()]
        return ArchiveMembers(files, file.astype(np.int32), self.offset[samples], self.size[samples], names, labels)


class ListedArchive(NamedTuple):
    """The samples of one archive."""

    file: int
    names: list[str]
    offset: np.ndarray  # int64
    size: np.ndarray  # int64

    @classmethod
    def from_members(cls, file: int, names: list[str], members: Sequence[Member]) -> ListedArchive:
        """Take members of an archive as samples.

        Args:
            file: The archive's number among all.
            names: Name of each sample.
            members: Member of the archive that holds each sample.

        Returns:
            The samples.
        """
        offsets, sizes = ([member[column] for member in members] for column in (1, 2))
        return cls(file, names, np.array(offsets, np.int64), np.array(sizes, np.int64))


def join(files: list[str], archives: Sequence[ListedArchive], labels: np.ndarray) -> ArchiveMembers:
    """Join the samples of all archives, one archive after the other.

    Args:
        files: The archives' paths, by their numbers.
        archives: Samples of the archives.
        labels: Class of each sample, uint32[N].

    Returns:
        The samples.
    """
    counts = [len(archive.names) for archive in archives]
    file = np.repeat(np.array([archive.file for archive in archives], np.int32), counts)
    offset = np.concatenate([np.zeros(0, np.int64), *(archive.offset for archive in archives)])
    size = np.concatenate([np.zeros(0, np.int64), *(archive.size for archive in archives)])
    return ArchiveMembers(files, file, offset, size, [name for archive in archives for name in archive.names], labels)
