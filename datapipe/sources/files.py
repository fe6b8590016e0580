"""Samples that are files."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

import numpy as np

from ..images import Buffer
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
