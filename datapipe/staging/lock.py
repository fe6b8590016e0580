"""The lock of a local folder: who waits for it says so, names the holder, and does not wait for one that is stuck."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .. import clock
from ..errors import StagingError
from ..foreign import check_folder, open_plain
from ..fsio import OWN_MODE, lock_holder, lock_holders, locked, make_folder

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between looks at a lock that another process holds
SAY_S = 10.0  # how often to say who holds it
MOMENT_S = 1.0  # who only looks at a file has let go of its lock by then


class BusyError(StagingError):
    """Another process holds a folder's lock."""


@contextmanager
def hold_lock(folder: Path, patience_s: float, waits: bool = True) -> Iterator[bool]:
    """Hold a folder's lock. Wait for another process, and say so, as long as something changes in the folder.

    Args:
        folder: is made if it is not there, or if another process, which makes room, removes it meanwhile.
        patience_s: how long nothing may change before the other process counts as stuck, in seconds.
        waits: whether to wait for longer than a moment.

    Yields:
        whether it is locked: some filesystems have no locks.

    Raises:
        BusyError: another process holds it, and `waits` is False, or that process does nothing.
        StagingError: other users could change the folder.
        FileNotFoundError: the folder is removed again and again, or cannot be made.
    """
    begun, said, state = clock.now(), float("-inf"), _state_of(folder)
    deadline = begun + patience_s
    with ExitStack() as stack:
        while True:
            try:
                make_folder(folder, OWN_MODE)
                is_locked = stack.enter_context(locked(folder, wait=False, may_vanish=True))
                break
            except FileNotFoundError:  # removed at this moment
                if clock.now() > deadline:
                    raise
                time.sleep(LOOK_S)
                continue
            except BlockingIOError:
                holder = "another process"
                with suppress(FileNotFoundError):
                    holder = lock_holder(folder) or holder
            if not waits and clock.now() < begun + LOOK_S / 2:  # of who only looks
                time.sleep(MOMENT_S / 20)
                continue
            if not waits:
                raise BusyError(f"{holder} is staging to it", path=folder)
            now = clock.now()
            if state != (state := _state_of(folder)):
                deadline = now + patience_s
            if now > deadline:
                message = f"{holder} holds its lock, and nothing has changed for {patience_s:g} s (timeout_s)"
                raise BusyError(f"{message}; end it, or choose another folder", path=folder)
            if now - said > SAY_S:
                said = now
                logger.info("%s: waiting for %s, which holds its lock", folder, holder)
            time.sleep(LOOK_S)
        check_folder(folder)  # in a folder such as /tmp, another user may have made it first
        yield is_locked


def find_holder(folder: Path) -> str:
    """Name the process that has a folder for itself, in order to stage to it; "" where nobody does."""
    if holder := lock_holder(folder):
        return holder
    if lock_holders(folder, shared=True):  # who only looks, as below
        return ""
    try:  # it may be in another container
        with locked(folder, wait=False, shared=True):
            return ""
    except BlockingIOError:
        return "another process"


@contextmanager
def hold_unused(path: Path) -> Iterator[None]:
    """Hold the lock of the file that the users of a copy hold, its manifest or slots, so that nobody uses the copy.

    Nothing is held where there is no such file, or where the filesystem has no locks.

    Raises StagingError where somebody uses the copy.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            fd, _ = open_plain(path)
            stack.callback(os.close, fd)
            deadline = clock.now() + MOMENT_S
            while not _lock_now(fd):
                if clock.now() > deadline:
                    holder = lock_holder(path, shared=True) or "another process"
                    message = f"is in use by {holder}: wait until that ends, or choose another folder"
                    raise StagingError(message, path=path.parent)
                time.sleep(MOMENT_S / 20)
        yield


def _lock_now(fd: int) -> bool:
    """Lock a file; return False where another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes while a process copies: names, times, and space taken."""
    entries = []
    with suppress(FileNotFoundError), os.scandir(folder) as scanned:
        for entry in scanned:
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                entries.append((entry.name, info.st_mtime_ns, info.st_blocks))
    return sorted(entries)
