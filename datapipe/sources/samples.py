"""Samples: files, members of archives, or pixels in memory.

Many threads read them at the same time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..formats.tar_listing import Member
from ..images import Buffer
from ..images.codec import encode_png
from .paths import (
    FLAGS,
    FOLDER_FLAGS,
    LEAVES,
    Descriptors,
    is_inside,
    open_file,
    own_memory,
    read_at,
    real_path,
    real_path_of,
)


@dataclass(eq=False)
class Files:
    """Samples that are files: `root / folders[folder[i]] / files[i]`. They take about 90 bytes of memory per sample.

    `bounds`: links that lead out of this folder are refused; None: links may lead anywhere.
    """

    root: str
    bounds: str | None
    folders: list[str]  # relative to `root` (or absolute); "" is `root` itself
    folder: np.ndarray  # int32[N]
    files: list[str]
    labels: np.ndarray
    blocks: None = None
    _folders: Descriptors = field(init=False, repr=False)
    _folder: memoryview = field(init=False, repr=False)  # of `folder`: is indexed faster, and gives Python's integers
    _real_bounds: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._folder = np.ascontiguousarray(self.folder, np.int32).data
        self._folders = Descriptors(len(self.folders), self._open_folder)

    @property
    def names(self) -> list[str]:
        folders = [f"{folder}/" if folder else "" for folder in self.folders]
        pairs = zip(self.folder.tolist(), self.files, strict=True)
        return [folders[folder] + name.rsplit(".", 1)[0] for folder, name in pairs]

    def __len__(self) -> int:
        return len(self.files)

    def where(self, i: int) -> str:
        return os.path.join(self.root, self.folders[self.folder[i]], self.files[i])

    def size_bytes(self, i: int) -> int:
        try:
            with self._folders.borrow(self._folder[i]) as folder:
                return os.stat(self.files[i], dir_fd=folder).st_size
        except (OSError, ValueError):  # reading it reports the error
            return 0

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """Read it with one open, one read (and one that finds the end) and one close.

        It is opened relative to its folder's descriptor, so that the filesystem only looks up its name.
        """
        number = self._folder[i]
        folder = self._folders.kept[number]
        if folder is not None:
            fd = open_file(self.files[i], self._real_bounds, folder)
        else:
            with self._folders.borrow(number) as folder:
                fd = open_file(self.files[i], self._real_bounds, folder)
        try:
            size = os.readv(fd, [buffer])
            # Fewer bytes than asked for need not be the end: Linux returns those before an error, then the error.
            while size < len(buffer):
                count = os.readv(fd, [buffer[size:]])
                if not count:
                    return buffer[:size]
                size += count
            return _read_on(fd, buffer)
        finally:
            os.close(fd)

    def place(self, i: int) -> tuple[int, str]:
        """Return its folder's descriptor, which stays open, or -1 if only `read` may open that; and its name there."""
        folder = self._folders.kept[self._folder[i]]
        return -1 if folder is None else folder, self.files[i]

    @property
    def flags(self) -> int:
        """With which files are opened at their place: links are left to `read`, if they have bounds."""
        return FLAGS if self._real_bounds is None else FLAGS | os.O_NOFOLLOW

    def close(self) -> None:
        self._folders.close()

    def _open_folder(self, number: int) -> int:
        if self.bounds is not None and self._real_bounds is None:
            self._real_bounds = real_path(self.bounds)
        fd = os.open(os.path.join(self.root, self.folders[number]), FOLDER_FLAGS)
        if self._real_bounds is not None and not is_inside(real_path_of(fd), self._real_bounds):
            os.close(fd)
            raise ValueError(f"its folder {LEAVES}")
        return fd


def _read_on(fd: int, buffer: memoryview) -> Buffer:
    """Read a whole file, of which `buffer` holds the beginning, into memory of its own."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    at = len(buffer)
    if status.st_size <= at:
        return buffer
    data = own_memory(status.st_size)
    data[:at] = buffer
    with memoryview(data) as view:
        at += read_at(fd, view[at:], at)
    if at < len(data):
        raise ValueError(f"is truncated: it ends after {at} of its {len(data)} bytes")
    return data


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

    @classmethod
    def of_archive(cls, path: str, names: list[str], members: Sequence[Member]) -> ArchiveMembers:
        """Return members of one archive as samples without labels.

        Args:
            path: The archive.
            names: Name of each sample.
            members: Member that holds each sample.
        """
        offset, size = (np.array([member[column] for member in members], np.int64) for column in (1, 2))
        return cls([path], np.zeros(len(names), np.int32), offset, size, names, np.zeros(0, np.uint32))

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


def join_archives(archives: Sequence[ArchiveMembers], labels: np.ndarray) -> ArchiveMembers:
    """Return the samples of all archives, one archive after the other, with labels, uint32[N]."""
    files = {path: number for number, path in enumerate(dict.fromkeys(archive.files[0] for archive in archives))}
    numbers = np.array([files[archive.files[0]] for archive in archives], np.int32)
    file = np.repeat(numbers, [len(archive) for archive in archives])
    offset = np.concatenate([np.zeros(0, np.int64), *(archive.offset for archive in archives)])
    size = np.concatenate([np.zeros(0, np.int64), *(archive.size for archive in archives)])
    names = [name for archive in archives for name in archive.names]
    return ArchiveMembers(list(files), file, offset, size, names, labels)


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
    """Return images as samples that are named by their place in the source.

    Args:
        origin: The source, for messages.
        labels: Integers[N], the class of each image.
        pixels: Pixels of the images, uint8[N, H, W] or [N, H, W, 3].
    """
    return Pixels(origin, [f"{i:05d}" for i in range(len(labels))], labels.astype(np.uint32), pixels)
