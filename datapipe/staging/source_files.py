"""The files that are copied, as they lie on the shared filesystem: opened once each, and read again when that fails."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..dataset.manifest import FileInfo
from ..errors import ShardCorruptError, StagingError
from ..fsio import named
from ..watched import Moved

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1  # before a failed read is tried again; doubled each time
SLICE_S = 0.5  # of waiting


class Throttle:
    """Keeps all threads together below a rate. Thread-safe.

    Args:
        bytes_per_s: Highest rate; None: any.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int, moved: Moved) -> None:
        """Wait until so many bytes may be read; `moved` is called meanwhile."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + num_bytes / self._bytes_per_s
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))
            moved()


class SourceFile:
    """A file of the source. Thread-safe.

    Args:
        path: Path of the file.
        info: Entry of the manifest for it.
        throttle: Limit of the rate of reading.
        retries: Number of times that a failed read is tried again, from 0. The file is opened again each time, since a
            stale handle lasts as long as its descriptor.
        is_shared: Whether other nodes read parts of it. Then the kernel reads nothing ahead, which would be theirs.
    """

    def __init__(self, path: Path, info: FileInfo, throttle: Throttle, retries: int, is_shared: bool = False) -> None:
        self.path, self.info, self._throttle, self._retries = path, info, throttle, retries
        self._advice = os.POSIX_FADV_RANDOM if is_shared else os.POSIX_FADV_SEQUENTIAL
        self._file: _OpenFile | None = None
        self._lock = threading.Lock()
        self._began: tuple[int, int, int] | None = None  # what it was when it was first opened

    def read(self, offset: int, into: memoryview, moved: Moved) -> None:
        """Read bytes.

        Args:
            offset: Place in the file.
            into: Memory for them, which is filled.
            moved: Function that is called after each read and while it waits.

        Raises:
            ShardCorruptError: The file is too short.
            OSError: It cannot be read.
        """
        self._throttle.wait(len(into), moved)
        for attempt in range(self._retries + 1):
            file = None
            try:
                with named(self.path):
                    file, done = self._open(), 0
                    while done < len(into) and (count := os.preadv(file.fd, [into[done:]], offset + done)):
                        done += count
                        moved()
                if done < len(into):
                    self.check_unchanged()
                    message = f"is cut short: {len(into)} bytes at {offset} end after {done}"
                    raise ShardCorruptError(message, path=self.path.parent, shard=self.path.name)
                return
            except OSError as error:
                if attempt == self._retries:
                    raise
                pause_s = FIRST_WAIT_S * 2**attempt
                logger.warning("%s: %s; trying again in %g s", self.path, error.strerror, pause_s)
                with self._lock:
                    if self._file is file:
                        self._file = None
                _sleep(pause_s, moved)

    def _open(self) -> _OpenFile:
        with self._lock:
            if self._file is None:
                file = _OpenFile(self.path)
                os.posix_fadvise(file.fd, 0, 0, self._advice)
                self._began = self._began or _state(os.fstat(file.fd))
                self._file = file
            return self._file

    def check_unchanged(self) -> None:
        """Raise StagingError if the file was changed, or replaced, since it was first opened."""
        if self._began is not None and _state(os.stat(self.path)) != self._began:
            raise StagingError("was changed while it was copied: stage again when that has ended", path=self.path)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._file = None


class _OpenFile:
    """An open file. It is closed with the last reference to it, so never while a thread reads it."""

    fd = -1

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # nothing was written
                os.close(self.fd)


def _state(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns


def _sleep(seconds: float, moved: Moved) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, SLICE_S))
        moved()
