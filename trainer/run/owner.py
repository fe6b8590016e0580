"""Whose run it is: one process trains in a run's folder, whatever locks its filesystem has.

RUN/.owner says which. Its process holds the file's lock, which NFS can lock, unlike a folder. Some filesystems have no
locks, or none that other hosts see, and a host that is cut off loses those that it had. So the owner also touches the
file every few seconds, and sees then whether the run is still its own.

    no file                      the run is free
    its lock is held             another process trains there, or is suspended
    its process is known here    it trains, or has ended
    else                         it trains if the file is touched again within DEAD_S; if not, it is dead
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from datapipe import clock
from datapipe.errors import SettingError
from datapipe.fsio import named
from datapipe.locks import close_lock, open_lock
from datapipe.process_id import ProcessId

logger = logging.getLogger(__name__)

NOTE = ".owner"
BEAT_S = 5.0  # how often an owner touches its note
DEAD_S = 6 * BEAT_S  # how long an owner that lives may seem not to
_LOOK_S = 0.5
CONFIRM_S = 2.0  # after which of two processes that take over the same run at once, the last one has done so
_MAX_BYTES = 4096  # of a note


@dataclass(frozen=True)
class Owner:
    """The process that trains in a run's folder.

    Attributes:
        process: Identity of the process.
        job: The scheduler's number of its job; "" in none.
        began: Time at which it took the run, in seconds since 1970.
    """

    process: ProcessId
    job: str
    began: float

    @classmethod
    def read(cls, content: bytes) -> Owner | None:
        """Read a note; None where it is none, or not yet."""
        try:
            fields = json.loads(content)
            return cls(ProcessId.read(fields["process"]), str(fields["job"]), float(fields["began"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.process.pid} on {self.process.host}{job}"


class _Lost(Exception):
    """The note is another process's, or gone."""


@contextmanager
def own(run: Path, job: str, lose: Callable[[str], object]) -> Iterator[None]:
    """Own a run for as long as the block runs. The child of a fork does not.

    Args:
        run: The run's folder.
        job: The scheduler's number of this process's job; "" in none.
        lose: Called with a reason, by another thread, where the run is another process's meanwhile: this one was cut
            off, or suspended, and counted as dead.

    Yields:
        Nothing: the run is owned.

    Raises:
        SettingError: Another process trains there, or has just taken over the run; names it.
        OSError: The note cannot be written.
    """
    me = Owner(ProcessId.here(), job, time.time())
    path, content = run / NOTE, json.dumps(asdict(me)).encode()
    fd = _take(path, content)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(path, content, ended, lose), name="trainer-owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if os.getpid() == me.process.pid:
            ended.set()
            _remove(path, content)
            close_lock(fd)


def _take(path: Path, content: bytes) -> int:
    """Write a note, and return its descriptor, which holds its lock where there are locks. Raises what `own` does."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    while True:
        is_new = True
        try:
            fd = open_lock(path, flags | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            is_new = False
            try:
                fd = open_lock(path, flags)
            except FileNotFoundError:  # its owner has ended at this moment
                continue
        try:
            is_locked = _lock(path, fd)
            if not is_new:
                _wait_for_end(path)
            if _is_same(path, fd):
                _write(path, fd, content, is_locked)
                if not is_new and not is_locked:
                    _confirm(path, content)
                return fd
        except BaseException:
            close_lock(fd)
            raise
        close_lock(fd)


def _lock(path: Path, fd: int) -> bool:
    """Lock a note; return whether that is possible here. Raises SettingError where another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(path) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): its owner is known by its signs of life alone", path, error)
        return False
    return True


def _is_same(path: Path, fd: int) -> bool:
    """Return whether a note is still the one that is open."""
    with suppress(FileNotFoundError):  # then it is not
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _wait_for_end(path: Path) -> None:
    """Return once the owner that a note names is known to be dead. Raises SettingError once it is known to live."""
    first, begun = None, clock.now()
    while True:
        try:
            last = _read(path)
        except FileNotFoundError:  # it has ended at this moment
            return
        owner = Owner.read(last[0])
        state = "unknown" if owner is None else owner.process.find_state()
        if state == "ended":
            return
        if state == "alive" or (first is not None and last != first):
            raise _refusal(path)
        limit_s = CONFIRM_S if owner is None else DEAD_S  # who has made it has died before it wrote it, or soon will
        if first is None:
            first = last
            logger.info("%s: waiting %.0f s to see whether %s trains there", path, limit_s, owner or "another process")
        if clock.now() - begun > limit_s:
            logger.warning("%s: %s gives no sign of life: taking over the run", path, owner or "another process")
            return
        time.sleep(_LOOK_S)


def _refusal(path: Path) -> SettingError:
    """Return the error that says who trains in the folder of a note."""
    what, owner, silent_s = f"--out {path.parent}: another process trains there", None, 0.0
    with suppress(OSError):  # the message needs no name
        content, touched_ns = _read(path)
        owner, silent_s = Owner.read(content), max(0.0, time.time() - touched_ns / 1e9)
    if owner is not None:
        age, silent = (timedelta(seconds=round(max(0.0, seconds))) for seconds in (time.time() - owner.began, silent_s))
        what += f": {owner}; it began {age} ago (h:mm:ss), and gave a sign of life {silent} ago"
    gone = f"; if its host is gone for good, remove {path}" if silent_s > DEAD_S else ""
    return SettingError(f"{what}. End it, wait for it, or use another folder{gone}")


def _read(path: Path) -> tuple[bytes, int]:
    """Return a note's content, and when it was touched, in nanoseconds. To open it asks a file server for both."""
    with open(path, "rb") as file:
        return file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns


def _write(path: Path, fd: int, content: bytes, is_locked: bool) -> None:
    """Write a note. Where the disk is full, an empty one will do, if it is locked: a complete run needs no room."""
    try:
        with named(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
            os.fsync(fd)
    except BaseException as error:
        if is_locked and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(fd, 0)
            return
        _remove(path, content)
        raise


def _remove(path: Path, content: bytes) -> None:
    """Remove a note, unless it is another process's by now."""
    with suppress(OSError, _Lost):  # a note that stays is that of a process that has ended
        _check(path, content)
        path.unlink()


def _check(path: Path, content: bytes) -> None:
    """Raise _Lost where a note is not this process's any more, and OSError where that cannot be known."""
    try:
        text, _ = _read(path)
    except FileNotFoundError:
        raise _Lost(f"{path} is gone: another process has taken over the run, or the file was removed") from None
    if text not in (content, b""):  # empty: the disk is full, or another process is just writing it
        raise _Lost(f"{Owner.read(text) or 'another process'} has taken over {path.parent}")


def _confirm(path: Path, content: bytes) -> None:
    """Raise SettingError where another process has taken over the run at the same time."""
    try:
        time.sleep(CONFIRM_S)
        _check(path, content)
    except _Lost:
        raise _refusal(path) from None
    except BaseException:  # such as a signal
        _remove(path, content)
        raise


def _beat(path: Path, content: bytes, ended: threading.Event, lose: Callable[[str], object]) -> None:
    while not ended.wait(BEAT_S):
        try:
            _check(path, content)
            os.utime(path)
        except _Lost as reason:
            if not ended.is_set():
                lose(str(reason))
            return
        except OSError as error:  # if this lasts, the owner seems to be dead; it will see then that it has lost the run
            logger.warning("%s cannot be touched: %s", path, error)
