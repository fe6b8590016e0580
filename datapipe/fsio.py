"""Files: never a finished name on unfinished bytes, and checksums."""

from __future__ import annotations

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
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

Item, Result = TypeVar("Item"), TypeVar("Result")
logger = logging.getLogger(__name__)

# What numpy.load raises, or json for what is nested too deep, or a part that is missing.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
PROBED = 4  # items whose time tells whether the filesystem makes us wait
AT_ONCE = 32  # requests to a filesystem that does
_warned: set[Path] = set()  # folders that cannot be locked, as the user knows by now
BLOCK_BYTES = 4 << 20  # one read or write; large enough that a parallel filesystem streams


def partial_path(path: Path, alone: bool = True) -> Path:
    """The name under which `path` is written until it is complete.

    Not `alone`: a name of this call's own, since another process may be writing the same file.
    """
    return path.with_name(f".{path.name}.partial" if alone else f".{path.name}.{uuid.uuid4().hex}.partial")


@contextmanager
def atomic_path(path: Path, alone: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving, sync it and rename it to `path`.

    On any exception the temporary file is removed and `path` stays as it was. What an earlier,
    killed run left under the temporary name is overwritten, unless it was not `alone`.
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
def atomic_write(path: Path, alone: bool = True) -> Iterator[BinaryIO]:
    """Like `atomic_path`, but yields the temporary file opened for binary writing."""
    with atomic_path(path, alone) as partial, open(partial, "wb") as file:
        yield file


@contextmanager
def locked(folder: Path, wait: bool, shared: bool = False) -> Iterator[bool]:
    """Hold a folder for this process, or all that share it; the kernel lets go when the process ends, however it ends.

    Raises BlockingIOError when another holds it and `wait` is False; else the wait is logged. A filesystem that cannot
    lock folders (NFS, Lustre without `flock`) does without: then it yields False.
    """
    fd, held = os.open(folder, os.O_RDONLY), True
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            logger.info("%s: waiting for another process that works there", folder)
            fcntl.flock(fd, kind)
        except OSError as error:
            if folder not in _warned:
                _warned.add(folder)
                logger.warning("%s cannot be locked (%s): make sure that no other process writes there", folder, error)
            held = False
        yield held
    finally:
        os.close(fd)


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `function` says of each item: several at once where a filesystem's latency is most of the time.

    Elsewhere threads only hinder each other: listing lets go of Python's lock at each name, and 8 threads take 3 to 7
    times as long as one.
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
    """Give an OSError from a read or write the name of the file: "no space left" alone helps nobody."""
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


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that they survive a power cut; one that exists is left as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a parent that may be written, but not listed
        sync_folder(path.parent)


def _ignore() -> None:
    """Nobody watches."""


def checksum(path: Path, moved: Callable[[], None] = _ignore) -> str:
    """xxh3-128 of a file's bytes, as 32 hexadecimal digits. `moved` is called after each read."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        update_from(digest, file, moved)
    return digest.hexdigest()


def update_from(digest: xxhash.xxh3_128, file: BinaryIO, moved: Callable[[], None] = _ignore) -> int:
    """Feed the rest of `file` to `digest`; return the number of bytes. `moved` is called after each read."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    total = 0
    while count := file.readinto(buffer):
        moved()
        digest.update(buffer[:count])
        total += count
    return total


def copy_verified(
    source: Path, target: Path, size_bytes: int, expected: str, moved: Callable[[], None] = _ignore
) -> int:
    """Copy `source` to `target`, resuming what an interrupted call left, and verify it.

    The bytes already there under the temporary name are hashed, not trusted: when the checksum of the
    whole is not `expected` (xxh3-128, hexadecimal) and some bytes were there before, the file is
    copied once more from its beginning. Returns the number of bytes read from `source`; raises
    ValueError when even a whole copy has another checksum. Unlike elsewhere, an interrupted copy
    leaves its temporary file behind: that is what the next call resumes. `moved` is called after each read and write;
    what it raises interrupts the copy.
    """
    partial = partial_path(target)
    with named(partial), open(source, "rb", buffering=0) as reader, open(partial, "a+b", buffering=0) as writer:
        if writer.tell() > size_bytes:
            writer.truncate(0)
        copied = 0
        while True:
            digest = xxhash.xxh3_128()
            writer.seek(0)
            resumed = update_from(digest, writer, moved)
            reader.seek(resumed)
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := reader.readinto(buffer):
                moved()
                digest.update(buffer[:count])
                _write_all(writer, buffer[:count])
                moved()
                copied += count
            if digest.hexdigest() == expected:
                break
            writer.truncate(0)
            if not resumed:
                partial.unlink()
                raise ValueError(f"xxh3-128 is {digest.hexdigest()}, expected {expected}")
        os.fsync(writer.fileno())
        moved()
    os.replace(partial, target)
    sync_folder(target.parent)
    return copied


def _write_all(file: BinaryIO, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def mounted_as(folder: Path) -> str:
    """The kind of filesystem, such as lustre or ext4 (proc(5), mounts)."""
    place, kinds = folder.resolve(), {}
    for line in Path("/proc/self/mounts").read_bytes().splitlines():  # names of any bytes
        _, mount, kind = line.split(b" ")[:3]
        name = re.sub(rb"\\([0-7]{3})", lambda escape: bytes([int(escape[1], 8) & 0xFF]), mount)
        kinds[Path(os.fsdecode(name))] = kind.decode()  # the last mount on a folder is the one that is seen
    return next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), "unknown")
