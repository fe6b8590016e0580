"""The cache of a node: the copies that lie in a folder, who uses them, and which of them are removed to make room.

A copy lies in CACHE/NAME, or CACHE/NAME/SPLIT. Only a copy is removed that has an `.origin.json` and is this user's,
and of it only the files that staging has put there. While that happens, this process holds the folder's lock, so that
nobody stages to it, and the manifest's, so that nobody uses it (see keep.py).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..dataset.arriving import KINDS
from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST, Manifest
from ..errors import DatapipeError
from ..foreign import read_note
from ..fsio import free_bytes
from ..streams import TIMEOUT_S, in_time
from .keep import KEEP, Keep, is_pinned, keeps_in
from .local_copy import CHECKED, compute_digest
from .origin import ORIGIN
from .progress import LOG

logger = logging.getLogger(__name__)

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TEMPORARY = re.compile(rf"\..+\.({'|'.join(KINDS)})")


@dataclass(frozen=True)
class CachedCopy:
    """A copy in a cache, as its folder shows it.

    Attributes:
        folder: of the copy.
        cache: that it lies in.
        source: folder of the data set.
        digest: of the data set's manifest, see `compute_digest`.
        files: names of the data set's files.
        size_bytes: what it takes on the disk.
        last_used: when its owner last staged or opened it, in seconds since 1970.
        owner: the user's number.
        device: of the filesystem.
        is_whole: whether it is a data set, or has the slots for a part of one.
    """

    folder: Path
    cache: Path
    source: str
    digest: str
    files: frozenset[str]
    size_bytes: int
    last_used: float
    owner: int
    device: int
    is_whole: bool

    @classmethod
    def read(cls, folder: Path, cache: Path) -> CachedCopy | None:
        """Describe a folder; return None where it is not a copy, or cannot be read."""
        try:
            fd = os.open(folder, FOLDER)
        except OSError:
            return None
        try:
            origin, info = json.loads(read_note(Path(ORIGIN), fd)), os.fstat(fd)
            noted = os.stat(ORIGIN, dir_fd=fd, follow_symlinks=False)
            if noted.st_uid != info.st_uid:  # someone else's word on what may be removed here
                return None
            if origin.get("files"):
                digest, names = str(origin["manifest"]), frozenset(map(os.path.basename, origin["files"]))
            else:  # of an earlier version of this software
                content = read_note(Path(MANIFEST), fd)
                manifest = Manifest.parse(content, folder / MANIFEST)
                digest, names = compute_digest(content), frozenset(file.name for file in manifest.all_files())
            with os.scandir(fd) as entries:
                sizes = {entry.name: entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries}
            size = sum(size for name, size in sizes.items() if name in names or is_note(name))
            place = folder, cache, str(origin["source"]), digest, names, size
            has_slots = bool(origin.get("capacity_bytes") and origin["is_complete"]) and {SLOTS, TAGS} <= sizes.keys()
            return cls(*place, noted.st_mtime, info.st_uid, info.st_dev, MANIFEST in sizes or has_slots)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DatapipeError):
            return None
        finally:
            os.close(fd)

    def levels(self) -> Iterator[Path]:
        """Iterate over the folders in which a note may keep this copy: its own, and those above it in the cache."""
        yield self.folder
        yield from (parent for parent in self.folder.parents if parent.is_relative_to(self.cache))

    def keeps(self) -> list[Keep]:
        """List the jobs that this copy is kept for."""
        return [keep for folder in self.levels() for keep in keeps_in(folder) if keep.is_valid()]

    def has_name_of_cache(self) -> bool:
        """Return whether the folder is named as `stage_once` names one: after the data set and its manifest."""
        return self.folder.name == f"{Path(self.source).name}-{self.digest}"

    def is_pinned(self) -> bool:
        return any(map(is_pinned, self.levels()))


def is_note(name: str) -> bool:
    """Return whether staging has put a file with this name beside the data set's."""
    return name in (MANIFEST, ORIGIN, CHECKED, LOG, SLOTS, TAGS) or bool(
        KEEP.fullmatch(name) or TEMPORARY.fullmatch(name)
    )


def find_copies(cache: Path) -> list[CachedCopy]:
    """List the copies in a cache, of all users, as far as they can be read."""
    copies, cache = [], cache.resolve()
    for folder in subfolders(cache):
        if copy := CachedCopy.read(folder, cache):
            copies.append(copy)
        else:
            copies += filter(None, (CachedCopy.read(split, cache) for split in subfolders(folder)))
    return copies


def subfolders(folder: Path) -> list[Path]:
    """List the folders in a folder, without links; none where it cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def claim(copy: CachedCopy, stack: ExitStack, also_kept: bool = False, is_locked: bool = False) -> int | None:
    """Lock a copy in order to remove it.

    Args:
        copy: of any user.
        stack: unlocks it.
        also_kept: whether a copy may be removed that is kept for a job.
        is_locked: whether this process has locked its folder.

    Returns:
        A descriptor of its folder, which `stack` closes; None where the copy is another user's, is in use, kept or
        pinned, where a process stages to it, or where the filesystem has no locks.
    """
    if copy.owner != os.geteuid():
        return None
    try:
        fd = os.open(copy.folder, FOLDER)
        stack.callback(os.close, fd)
        if not is_locked:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in (MANIFEST, SLOTS):  # what its users hold
            with suppress(FileNotFoundError):
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                lock = os.open(name, flags, dir_fd=fd)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = os.fstat(fd).st_uid == os.stat(ORIGIN, dir_fd=fd, follow_symlinks=False).st_uid == os.geteuid()
        is_there = os.path.samestat(os.fstat(fd), os.lstat(copy.folder))
    except OSError:
        return None
    is_kept = copy.is_pinned() or (bool(copy.keeps()) and not also_kept)
    return fd if is_mine and is_there and not is_kept else None


def remove(copy: CachedCopy, why: str) -> bool:
    """Remove a copy, its manifest first, and its folder if that is empty then.

    Args:
        copy: of any user.
        why: for the log.

    Returns:
        Whether it was removed; False where `claim` says that it may not, or something cannot be removed.
    """
    with ExitStack() as stack:
        fd = claim(copy, stack)
        return fd is not None and remove_claimed(copy, fd, why)


def remove_claimed(copy: CachedCopy, fd: int, why: str, spared: str = "") -> bool:
    """Do what `remove` does, for a copy that is claimed.

    Args:
        copy: of this user.
        fd: of `claim`.
        why: for the log.
        spared: a file that stays.

    Returns:
        Whether it was removed.
    """
    names = [name for name in os.listdir(fd) if (name in copy.files or is_note(name)) and name != spared]
    names.sort(key=lambda name: (name != MANIFEST, name == ORIGIN))  # last, what shows that it is a copy
    try:
        for name in names:
            os.unlink(name, dir_fd=fd)
            if name == MANIFEST:
                os.fsync(fd)
        for folder in (copy.folder, copy.folder.parent):
            if folder != copy.cache and folder.is_relative_to(copy.cache):
                for keep in keeps_in(folder):
                    if not keep.is_valid():
                        keep.path.unlink(missing_ok=True)
                with suppress(OSError):  # it is not empty
                    os.rmdir(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", copy.folder, error.strerror)
        return False
    size, used = f"{copy.size_bytes:,} bytes", time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.last_used))
    logger.info("removed %s (%s, copied from %s, last used %s): %s", copy.folder, size, copy.source, used, why)
    return True


def evictable(cache: Path, device: int, spared: Collection[Path]) -> list[CachedCopy]:
    """List the copies in a cache that may be removed to make room, the least recently used first.

    Args:
        cache: the folder that they lie in.
        device: of the filesystem that has too little room.
        spared: folders of copies that are not removed, and of what they are copied from.
    """
    copies = in_time(lambda: find_copies(cache), cache, TIMEOUT_S)  # a filesystem may be mounted in it
    sources = {copy.source for copy in copies} | {str(path.resolve()) for path in spared}
    unused = []
    for copy in sorted(copies, key=lambda copy: (copy.last_used, copy.folder)):
        if copy.device == device and str(copy.folder) not in sources:
            with ExitStack() as stack:
                if claim(copy, stack) is not None:
                    unused.append(copy)
    return unused


def evict(
    local: Path, cache: Path, needed: int, spared: Collection[Path] = (), in_part: bool = False
) -> list[CachedCopy]:
    """Remove copies that nobody uses, the least recently used first, and no more than are needed to make room.

    Args:
        local: a folder on the filesystem where room is needed.
        cache: the folder that the copies lie in.
        needed: bytes that are to be free.
        spared: as in `evictable`.
        in_part: whether copies are removed, too, if there is not enough room without all of them.

    Returns:
        The copies that were removed.
    """
    removed: list[CachedCopy] = []
    if needed <= free_bytes(local):
        return removed
    copies = evictable(cache, local.stat().st_dev, spared)
    if not in_part and needed > free_bytes(local) + sum(copy.size_bytes for copy in copies):
        return removed
    for copy in copies:
        if needed <= free_bytes(local):
            break
        if remove(copy, "to make room"):
            removed.append(copy)
    return removed


def remove_earlier(source: Path, local: Path, content: bytes) -> None:
    """Remove the copies of earlier versions of a data set that nobody uses, keeps or has pinned.

    Args:
        source: folder of the data set.
        local: folder of the copy of its present version; the others lie beside it.
        content: of the present version's manifest.
    """
    for copy in find_copies(local.parent):
        if copy.source == str(source.resolve()) and copy.digest != compute_digest(content):
            remove(copy, f"{local.name} is of a later version")
