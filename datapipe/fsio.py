"""Files: a final name only on complete bytes, locks, checksums, and copies that are verified."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from .foreign import open_regular

Item = TypeVar("Item")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)

# What numpy.load and json raise for a file that is damaged, nested too deep, or incomplete.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
PROBED = 4  # items that are timed, to find out whether the filesystem has a high latency
AT_ONCE = 32  # requests at a time to a filesystem that has
# Kinds in /proc/mounts that are shared over a network, and slow at opening files.
NETWORK_FILESYSTEMS: tuple[str, ...] = ("lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "wekafs", "panfs", "cifs")
NETWORK_FILESYSTEMS += ("smb3", "9p", "glusterfs")
BOOT_ID, LOCKS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/locks")
_warned: set[Path] = set()  # what cannot be locked or read, for which a warning has been logged
_locks: set[int] = set()  # descriptors of this process's locks
OWN_MODE = 0o755  # what only this user writes to, and others may read
PRIVATE_MODE = 0o700  # what no other user enters
BLOCK_BYTES = 1 << 20  # read at once to be hashed: they stay in a core's cache


def partial_path(path: Path, alone: bool = True) -> Path:
    """Return the name under which `path` is written until it is complete.

    If not `alone`, it is unique to this call, since another process may be writing the same file.
    """
    return path.with_name(f".{path.name}.partial" if alone else f".{path.name}.{uuid.uuid4().hex}.partial")


def remove_old_partials(folder: Path) -> None:
    """Remove what processes that were killed over an hour ago have left there of files that others write as well."""
    for path in folder.glob(f".*.{'[0-9a-f]' * 32}.partial"):
        with suppress(FileNotFoundError):  # it was renamed, or removed
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


@contextmanager
def atomic_path(path: Path, alone: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving, sync it and rename it to `path`.

    On any exception the temporary file is removed and `path` is unchanged. What an earlier call that was killed left
    under the temporary name is overwritten (if `alone`, see `partial_path`).
    """
    partial = partial_path(path, alone)
    partial.unlink(missing_ok=True)
    try:
        with named(partial):
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_write(path: Path, alone: bool = True, is_own: bool = False) -> Iterator[BinaryIO]:
    """Do what `atomic_path` does, and yield the temporary file opened for binary writing.

    Args:
        path: See `atomic_path`.
        alone: See `atomic_path`.
        is_own: Whether other users may not write to it, whatever the umask; else it would not be believed.
    """
    with atomic_path(path, alone) as partial, open(partial, "wb") as file:
        if is_own:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & OWN_MODE)
        yield file


@contextmanager
def locked(folder: Path, wait: bool, shared: bool = False, may_vanish: bool = False) -> Iterator[bool]:
    """Lock a folder. The kernel unlocks it when the process ends, in whatever way; its children do not keep it.

    Args:
        folder: must exist.
        wait: wait for other processes that have locked it (and log that), instead of raising.
        shared: other processes may have a shared lock at the same time.
        may_vanish: another process may remove the folder before this one has locked it.

    Yields:
        whether it is locked: a filesystem that cannot lock folders (NFS, Lustre without `flock`) is used without.

    Raises:
        BlockingIOError: another process has locked it, and `wait` is False.
        FileNotFoundError: it was removed, and `may_vanish`.
    """
    fd, is_locked = open_lock(folder, os.O_RDONLY), True
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            holder = lock_holder(folder, shared=True) or "a process that cannot be seen from here"
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


def boot_id() -> str:
    """Return what tells this host's present life from its earlier ones, and from other hosts' (random(4)).

    "" where the system does not show it, as in a container whose /proc has process numbers alone.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        if BOOT_ID not in _warned:
            _warned.add(BOOT_ID)
            logger.warning("%s: hosts are told apart by their names alone", error)
        return ""


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call `function` for each item and return the results in order; in threads where that is faster.

    Threads help where most of the time is a filesystem's latency, which the first items tell. Elsewhere they hinder
    each other: listing releases Python's lock at each name, and 8 threads take 3 to 7 times as long as a single one.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    results = list(map(function, items[:PROBED]))
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    if wall <= 2 * cpu:
        return [*results, *map(function, items[PROBED:])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*results, *pool.map(function, items[PROBED:])]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError from a read or write: "no space left" alone does not help."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, so that they survive a power cut; one that exists is not changed.

    Args:
        path: Of the folder.
        mode: Of each that is made, less what the umask takes away.
    """
    if path.is_dir():
        return
    make_folder(path.parent, mode)
    try:
        path.mkdir(mode)
    except FileExistsError:  # another process has made it, and may have removed it by now
        if os.path.lexists(path) and not path.is_dir():
            raise
    with suppress(PermissionError):  # a parent that may be written to, but not listed
        sync_folder(path.parent)


def _ignore() -> None:
    """Do nothing: no caller watches the progress."""


def checksum(path: Path, moved: Callable[[], None] = _ignore) -> str:
    """Compute the xxh3-128 of a file's bytes, as 32 hexadecimal digits. `moved` is called after each read."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        return checksum_of(file, moved)


def checksum_of(file: FileIO, moved: Callable[[], None] = _ignore) -> str:
    """Do what `checksum` does, of what is left to read of an open file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):
        moved()
        digest.update(buffer[:count])
    return digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Return the free space of the filesystem that `folder` lies on."""
    return shutil.disk_usage(folder).free


def mounted_as(folder: Path) -> str:
    """Return the kind of filesystem that a folder lies on, such as lustre or ext4 (proc(5), mounts)."""
    place, kinds = folder.resolve(), {}
    for line in Path("/proc/self/mounts").read_bytes().splitlines():  # names may be any bytes
        _, mount, kind = line.split(b" ")[:3]
        name = re.sub(rb"\\([0-7]{3})", lambda escape: bytes([int(escape[1], 8) & 0xFF]), mount)
        kinds[Path(os.fsdecode(name))] = kind.decode()  # the last mount on a folder hides the others
    return next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), "unknown")
