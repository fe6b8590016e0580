"""Opening what lies in a source: with few requests to its filesystem, and by no link that leads out of it.

`bounds` is the folder that links may not leave, as the user named it (None: they lead anywhere); `real_bounds` its real
path.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import SourceError

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # of a pipe that is called x.jpg: do not wait for its writer
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
LEAVES = "is a link that leads out of the source; --outside follows it"
MAX_IMAGE_BYTES = 1 << 30  # twice the pixels that `image.MAX_PIXELS` allows, uncompressed: beyond is no image


def real_path(path: str, dir_fd: int | None = None) -> str:
    """Where a path ends when every link in it is followed. Raises OSError, and ValueError for links in a circle.

    The kernel walks it, and tells: `os.path.realpath` would ask about each of its parts. O_PATH opens no file, so no
    device acts and no pipe waits.
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
    return os.readlink(f"/proc/self/fd/{fd}")


def is_inside(path: str, folder: str) -> bool:
    """Both real paths."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def follow(path: str, real_bounds: str | None, dir_fd: int | None = None) -> str:
    """`real_path`; raises ValueError when it leaves the bounds."""
    real = real_path(path, dir_fd)
    if real_bounds is not None and not is_inside(real, real_bounds):
        raise ValueError(LEAVES)
    return real


def open_file(path: str, real_bounds: str | None, dir_fd: int | None = None) -> int:
    """A descriptor of a file. Costs one request, unless it is a link. Raises OSError, ValueError."""
    try:
        return os.open(path, FLAGS if real_bounds is None else FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.open(follow(path, real_bounds, dir_fd), FLAGS | os.O_NOFOLLOW)


@contextmanager
def refused(path: str) -> Iterator[None]:
    """What cannot be opened while a source is listed: OSError and ValueError become a SourceError that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise SourceError(reason, path=path) from error


def check_inside(path: str, bounds: str | None) -> None:
    """Raises SourceError for a path that leads out of the bounds, or nowhere."""
    with refused(path):
        follow(path, bounds and real_path(bounds))


@contextmanager
def opened(path: str, bounds: str | None) -> Iterator[int]:
    """A descriptor of a folder or large file to be listed: its path is checked whole.

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
    """Fill `buffer` from `offset` of a file; return how many bytes there are: fewer only where the file ends.

    A read may give less than there is: before an error (which only the next read tells), or at a signal.
    """
    size = os.preadv(fd, [buffer], offset)
    while size < len(buffer):
        count = os.preadv(fd, [memoryview(buffer)[size:]], offset + size)
        if not count:
            break
        size += count
    return size


def own_memory(size: int) -> bytearray:
    """For an image that the buffer is too small for. Raises ValueError."""
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"is no image: {size} bytes")
    return bytearray(size)


class Descriptors:
    """Open descriptors of `count` folders or files, by number, each made when it is first needed.

    `kept[i]` is one, or None: then `borrow` it. Nothing is closed before `close`, since another thread may be about to
    use it; beyond what the system lets us have open, none is kept.
    """

    def __init__(self, count: int, open: Callable[[int], int]) -> None:
        self.kept: list[int | None] = [None] * count
        self._open = open
        self._room = _allow(count)
        self._counting = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}  # by number: several at once, but none twice

    @contextmanager
    def borrow(self, i: int) -> Iterator[int]:
        """A descriptor that is there as long as the context. Raises what opening it raises."""
        with self._counting:
            mine = self._opening.setdefault(i, threading.Lock())
        with mine:  # opening may hang: then only those wait that need the same
            fd = self.kept[i]
            if fd is None:
                fd = self._open(i)
                with self._counting:
                    if self._room > 0:
                        self._room -= 1
                        self.kept[i] = fd
        kept = self.kept[i] == fd
        try:
            yield fd
        finally:
            if not kept:
                os.close(fd)

    def close(self) -> None:
        """Nothing may be borrowed now."""
        with self._counting:
            for i, fd in enumerate(self.kept):
                if fd is not None:
                    os.close(fd)
                    self.kept[i] = None
                    self._room += 1


def _allow(count: int) -> int:
    """How many of `count` descriptors may stay open: at most a quarter of all, for this is one split of several.

    The usual soft limit of 1,024 is raised for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * count + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, soft // 4)
