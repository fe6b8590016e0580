"""Open what lies in a source, with few requests to its filesystem, and without following links that lead out of it.

`bounds` is the folder that links must not leave, as the user named it (None: links may lead anywhere); `real_bounds` is
its real path.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import SourceError

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the last: do not wait for the writer of a pipe named x.jpg
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
LEAVES = "is a link that leads out of the source; --outside follows it"
_MAX_IMAGE_BYTES = 1 << 30  # twice what `codec.MAX_PIXELS` pixels take uncompressed: nothing larger is an image


def real_path(path: str, dir_fd: int | None = None) -> str:
    """Follow every link in a path. Raises OSError, and ValueError for links in a circle.

    The kernel does it in one request; `os.path.realpath` would ask about each part of the path. O_PATH does not open
    the file itself, so no device acts and no pipe waits.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("is a link that leads in a circle") from error
        raise
    try:
        return real_path_of(fd)
    finally:
        os.close(fd)


def real_path_of(fd: int) -> str:
    """Return the real path of an open file or folder."""
    return os.readlink(f"/proc/self/fd/{fd}")


def is_inside(path: str, folder: str) -> bool:
    """Whether a real path is, or lies in, a folder, given by its real path."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def follow(path: str, real_bounds: str | None, dir_fd: int | None = None) -> str:
    """Return the real path, as `real_path` does. Raises ValueError when it leaves the bounds.

    Args:
        path: Absolute, or relative to `dir_fd`.
        real_bounds: See above.
        dir_fd: A folder's descriptor.
    """
    real = real_path(path, dir_fd)
    if real_bounds is not None and not is_inside(real, real_bounds):
        raise ValueError(LEAVES)
    return real


def open_file(path: str, real_bounds: str | None, dir_fd: int | None = None) -> int:
    """Open a file, with one request unless it is a link, and return its descriptor.

    Args:
        path: Absolute, or relative to `dir_fd`.
        real_bounds: See above.
        dir_fd: A folder's descriptor.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is a link that leaves the bounds, or in a circle.
    """
    try:
        return os.open(path, FLAGS if real_bounds is None else FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.open(follow(path, real_bounds, dir_fd), FLAGS | os.O_NOFOLLOW)


@contextmanager
def refused(path: str) -> Iterator[None]:
    """Turn OSError and ValueError into a SourceError that names the path, while a source is listed."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            reason = "is a link that leads nowhere: mend or remove it"
        raise SourceError(reason, path=path) from error


def check_inside(path: str, bounds: str | None) -> None:
    """Raise SourceError for a path that leads out of the bounds, or nowhere."""
    with refused(path):
        follow(path, bounds and real_path(bounds))


@contextmanager
def open_checked(path: str, bounds: str | None) -> Iterator[int]:
    """Open a folder or large file to be listed, every part of whose path is checked; yield its descriptor.

    Raises SourceError, also in place of an OSError while the descriptor is used.
    """
    with refused(path):
        fd = os.open(follow(path, bounds and real_path(bounds)), FLAGS)
    try:
        yield fd
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror or error}", path=path) from error
    finally:
        os.close(fd)


def read_at(fd: int, buffer: memoryview | bytearray, offset: int) -> int:
    """Fill a buffer from a file, and return the number of bytes: fewer than asked for only at the end of the file.

    A read may return less than there is, before an error (which the next read raises) or when a signal arrives.

    Args:
        fd: The file's descriptor.
        buffer: Memory to read into.
        offset: Offset of the bytes in the file, in bytes.
    """
    size = os.preadv(fd, [buffer], offset)
    while size < len(buffer):
        count = os.preadv(fd, [memoryview(buffer)[size:]], offset + size)
        if not count:
            break
        size += count
    return size


def own_memory(size: int) -> bytearray:
    """Allocate memory for an image that the buffer is too small for. Raises ValueError for what is not an image."""
    if size > _MAX_IMAGE_BYTES:
        raise ValueError(f"is not an image: {size} bytes")
    return bytearray(size)


class Descriptors:
    """Descriptors of `count` folders or files, by number, each opened when it is first needed.

    `kept[i]` is a descriptor that stays open, or None: then `borrow` it. Kept ones are closed in `close` only, since
    another thread may be about to use them. No more are kept than the system lets a process have open.
    """

    def __init__(self, count: int, open: Callable[[int], int]) -> None:
        self.kept: list[int | None] = [None] * count
        self._open = open
        self._room = _allow(count)
        self._counting = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}  # by number: several are opened at the same time, but none twice

    @contextmanager
    def borrow(self, i: int) -> Iterator[int]:
        """Yield a descriptor that is open as long as the context. Raises what opening it raises."""
        with self._counting:
            opening = self._opening.setdefault(i, threading.Lock())
        with opening:  # it may hang: then only threads wait that need the same descriptor
            fd = self.kept[i]
            if fd is None:
                fd = self._open(i)
                with self._counting:
                    if self._room > 0:
                        self._room -= 1
                        self.kept[i] = fd
        is_kept = self.kept[i] == fd
        try:
            yield fd
        finally:
            if not is_kept:
                os.close(fd)

    def close(self) -> None:
        """Close all. No other thread may be using any."""
        with self._counting:
            for i, fd in enumerate(self.kept):
                if fd is not None:
                    os.close(fd)
                    self.kept[i] = None
                    self._room += 1


def _allow(count: int) -> int:
    """Return how many of `count` descriptors may stay open: at most a quarter of all, for one split of several.

    Raises the soft limit of open files, which usually is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * count + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, soft // 4)
