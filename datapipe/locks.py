"""Locks of folders and files (flock): one process has them, or several share them; a waiting one names the holder.

The kernel releases a lock when its process ends, in whatever way. Some filesystems have none (NFS, Lustre without
`flock`): then folders are used without, and nothing is removed that a process might use.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from . import clock
from .errors import StagingError
from .foreign import check_folder, open_plain
from .fsio import OWN_MODE, list_entries, make_folder

logger = logging.getLogger(__name__)

LOCKS = Path("/proc/locks")
UNSEEN = "a process that cannot be seen from here"  # in another container, or on another host
_LOOK_S = 0.5  # between looks at a lock that another process holds
_SAY_S = 10.0  # how often to say who holds it
_MOMENT_S = 1.0  # a process that only looks at a file has let go of its lock by then
_warned: set[Path] = set()  # what cannot be locked, for which a warning has been logged
_locks: set[int] = set()  # descriptors of this process's locks


class BusyError(StagingError):
    """Another process holds a lock."""


@contextmanager
def locked(folder: Path, wait: bool, shared: bool = False, may_vanish: bool = False) -> Iterator[bool]:
    """Lock a folder; the children of this process do not keep the lock.

    Args:
        folder: Folder that exists.
        wait: Whether to wait for other processes that have locked it (and log that), instead of raising.
        shared: Whether other processes may have a shared lock at the same time.
        may_vanish: Whether another process may remove the folder before this one has locked it.

    Yields:
        Whether it is locked: a filesystem that cannot lock folders is used without.

    Raises:
        BlockingIOError: Another process has locked it, and `wait` is False.
        FileNotFoundError: It was removed, and `may_vanish`.
    """
    fd, is_locked = open_lock(folder, os.O_RDONLY), True
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            holder = lock_holder(folder, shared=True) or UNSEEN
            logger.info("%s: waiting until %s, which has locked it, is done with it", folder, holder)
            fcntl.flock(fd, kind)
        except OSError as error:
            if folder not in _warned:
                _warned.add(folder)
                logger.warning("%s cannot be locked (%s): make sure that no other process writes there", folder, error)
            is_locked = False
        if may_vanish and not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, "was removed, and made again, meanwhile", str(folder))
        yield is_locked
    finally:
        close_lock(fd)


def open_lock(path: Path, flags: int) -> int:
    """Open what is to be locked. No child that is forked gets it: a lock lasts until all have closed its file."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _locks.add(fd)
    return fd


def close_lock(fd: int) -> None:
    """Close what `open_lock` has opened; in a child that was forked meanwhile, it is closed already."""
    if fd in _locks:
        _locks.remove(fd)
        os.close(fd)


def _close_locks() -> None:
    for fd in list(_locks):
        with suppress(OSError):
            close_lock(fd)


os.register_at_fork(after_in_child=_close_locks)


def lock_holder(path: Path, shared: bool = False) -> str:
    """Name the process that holds a folder's or file's lock, such as "process 17 (datapipe)"; "" where it is not known.

    It may be in another container, or on another host. See `lock_holders` for `shared`.
    """
    for pid in lock_holders(path, shared):
        with suppress(OSError):
            return f"process {pid} ({Path('/proc', str(pid), 'comm').read_text().strip()})"
    return ""


def lock_holders(path: Path, shared: bool = False) -> list[int]:
    """List the processes that hold a folder's or file's lock, those that can be seen from here.

    None without /proc/locks. Those that share it count only if `shared`.
    """
    kinds, info = ("WRITE", "READ") if shared else ("WRITE",), os.stat(path)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        lines = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return []
    # proc(5): "1: FLOCK ADVISORY WRITE pid dev:inode 0 EOF"; a line with "->" is of a process that waits
    locks = [row for row in lines if len(row) > 5 and row[1] == "FLOCK" and row[3] in kinds and row[5] == place]
    return [int(row[4]) for row in locks if row[4] != "0"]


@contextmanager
def locked_soon(folder: Path, limit_s: float) -> Iterator[bool]:
    """Lock a folder that processes lock only for moments; after a time limit, do without.

    Args:
        folder: Folder that exists. One that this user may not list is not locked.
        limit_s: Longest time to wait, in seconds.

    Yields:
        Whether it is locked.
    """
    deadline = clock.now() + limit_s
    with ExitStack() as stack:
        is_locked = False
        while clock.now() < deadline:
            try:
                is_locked = stack.enter_context(locked(folder, wait=False))
                break
            except BlockingIOError:
                time.sleep(_MOMENT_S / 20)
            except OSError:  # this user may not list it
                break
        yield is_locked


@contextmanager
def hold_lock(folder: Path, patience_s: float, waits: bool = True) -> Iterator[bool]:
    """Hold a folder's lock. Wait for another process, and say so, as long as something changes in the folder.

    Args:
        folder: Folder to lock. It is made if it is not there, or if another process, which makes room, removes it.
        patience_s: Time without a change after which the other process counts as stuck, in seconds.
        waits: Whether to wait for longer than a moment.

    Yields:
        Whether it is locked: some filesystems have no locks.

    Raises:
        BusyError: Another process holds it, and `waits` is False, or that process does nothing.
        StagingError: Other users could change the folder.
        FileNotFoundError: The folder is removed again and again, or cannot be made.
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
                time.sleep(_LOOK_S)
                continue
            except BlockingIOError:
                holder = "another process"
                with suppress(FileNotFoundError):
                    holder = lock_holder(folder) or holder
            if not waits and clock.now() < begun + _LOOK_S / 2:  # of who only looks
                time.sleep(_MOMENT_S / 20)
                continue
            if not waits:
                raise BusyError(f"{holder} is staging to it", path=folder)
            now = clock.now()
            if state != (state := _state_of(folder)):
                deadline = now + patience_s
            if now > deadline:
                message = f"{holder} holds its lock, and nothing has changed for {patience_s:g} s (timeout_s)"
                raise BusyError(f"{message}; end it, or choose another folder", path=folder)
            if now - said > _SAY_S:
                said = now
                logger.info("%s: waiting for %s, which holds its lock", folder, holder)
            time.sleep(_LOOK_S)
        check_folder(folder)  # in a folder such as /tmp, another user may have made it first
        yield is_locked


def find_holder(folder: Path) -> str:
    """Name the process that has a folder for itself, in order to stage to it; "" if there is none, or no folder."""
    try:
        if holder := lock_holder(folder):
            return holder
        if lock_holders(folder, shared=True):  # who only looks, as below
            return ""
        with locked(folder, wait=False, shared=True):
            return ""
    except BlockingIOError:  # it is in another container
        return "another process"
    except FileNotFoundError:
        return ""


@contextmanager
def hold_unused(path: Path) -> Iterator[None]:
    """Hold the lock of the file that the users of a copy hold, its manifest or slots, so that no process uses the copy.

    If the file does not exist, nothing is held.

    Raises:
        StagingError: A process uses the copy, or that cannot be known, since the filesystem has no locks.
    """
    try:
        fd, _ = open_plain(path)
    except OSError:  # there is none, or it is a pipe, say
        yield
        return
    try:
        deadline = clock.now() + _MOMENT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if clock.now() > deadline:
                    holder = lock_holder(path, shared=True) or UNSEEN
                    message = f"is in use by {holder}: wait until that ends, or choose another folder"
                    raise StagingError(message, path=path.parent) from error
                time.sleep(_MOMENT_S / 20)
            except OSError as error:
                message = f"cannot be locked ({error.strerror}), so that a process may use it"
                advice = "choose another folder, or make sure that none does, and remove it"
                raise StagingError(f"{message}: {advice}", path=path.parent) from error
        yield
    finally:
        os.close(fd)


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes while a process copies: names, times, and space taken."""
    return sorted((name, info.st_mtime_ns, info.st_blocks) for name, info in list_entries(folder).items())
