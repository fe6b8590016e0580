"""Files: a final name only on complete bytes, checksums, and copies that are verified."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
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

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)

# What numpy.load and json raise for a file that is damaged, nested too deep, or incomplete.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
_PROBED = 4  # items that are timed, to find out whether the filesystem has a high latency
_AT_ONCE = 32  # requests at a time to a filesystem that has
# Kinds in /proc/mounts that are shared over a network, and slow at opening files.
NETWORK_FILESYSTEMS: tuple[str, ...] = ("lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "wekafs", "panfs", "cifs")
NETWORK_FILESYSTEMS += ("smb3", "9p", "glusterfs")
UNKNOWN = "unknown"  # kind of a filesystem, where the system does not tell it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_warned: set[Path] = set()  # what cannot be read, for which a warning has been logged
OWN_MODE = 0o755  # what only this user writes to, and others may read
PRIVATE_MODE = 0o700  # what no other user enters
_BLOCK_BYTES = 1 << 20  # read at once to be hashed: they stay in a core's cache


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


def side_by_side(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call `function` for each item and return the results in order; in threads where that is faster.

    Threads help where most of the time is a filesystem's latency, which the first items tell. Elsewhere they hinder
    each other: listing releases Python's lock at each name, and 8 threads take 3 to 7 times as long as a single one.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    results = list(map(function, items[:_PROBED]))
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    if wall <= 2 * cpu:
        return [*results, *map(function, items[_PROBED:])]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [*results, *pool.map(function, items[_PROBED:])]


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
        path: Path of the folder.
        mode: Mode of each folder that is made, less what the umask takes away.
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


def list_entries(folder: Path | int) -> dict[str, os.stat_result]:
    """List what lies in a folder, by name; links are not followed. What cannot be read is left out.

    Args:
        folder: Path of the folder, or a descriptor of it.
    """
    entries = {}
    with suppress(OSError), os.scandir(folder) as scanned:
        for entry in scanned:
            with suppress(OSError):  # removed at this moment, or a mount whose server is gone
                entries[entry.name] = entry.stat(follow_symlinks=False)
    return entries


def list_folders(folder: Path, follows: bool = False) -> list[Path]:
    """List the folders in a folder, by name, and if `follows` links to folders; none if it cannot be read."""
    entries = sorted(list_entries(folder).items())
    return [
        folder / name
        for name, info in entries
        if stat.S_ISDIR(info.st_mode) or (follows and os.path.isdir(folder / name))
    ]


def _ignore() -> None:
    """Do nothing: no caller watches the progress."""


def checksum(path: Path, moved: Callable[[], None] = _ignore) -> str:
    """Compute the xxh3-128 of a file's bytes, as 32 hexadecimal digits. `moved` is called after each read."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        return checksum_of(file, moved)


def checksum_of(file: FileIO, moved: Callable[[], None] = _ignore) -> str:
    """Do what `checksum` does, of what is left to read of an open file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(buffer):
        moved()
        digest.update(buffer[:count])
    return digest.hexdigest()


class Descriptor:
    """A descriptor that is closed by `close`, or with the last reference to it: never while a thread uses it.

    Args:
        fd: Descriptor of an open file.
    """

    fd = -1

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):  # what has to reach the disk is synced before
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def free_bytes(folder: Path) -> int:
    """Return the free space of the filesystem that `folder` lies on."""
    return shutil.disk_usage(folder).free


def existing_folder(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def mounted_as(folder: Path) -> str:
    """Return the kind of filesystem that a folder lies on, such as lustre or ext4 (proc(5), mounts); or UNKNOWN."""
    try:
        lines = Path("/proc/self/mounts").read_bytes().splitlines()  # names may be any bytes
    except OSError:
        return UNKNOWN
    place, kinds = folder.resolve(), {}
    for line in lines:
        _, mount, kind = line.split(b" ")[:3]
        name = re.sub(rb"\\([0-7]{3})", lambda escape: bytes([int(escape[1], 8) & 0xFF]), mount)
        kinds[Path(os.fsdecode(name))] = kind.decode()  # the last mount on a folder hides the others
    return next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), UNKNOWN)
