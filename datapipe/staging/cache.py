"""The cache of a node: the copies that lie in a folder, and which of them are removed to make room.

A copy lies in CACHE/NAME, or CACHE/NAME/SPLIT. Only a copy is removed that has an `.origin.json` and is this user's,
and of it only the files that staging has put there. Until they are gone, this process holds the folder's lock, so that
no process stages to it, and the manifest's, so that none uses it (see lease.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS
from ..dataset.manifest import MANIFEST
from ..errors import StagingError
from ..fsio import existing_folder, free_bytes, mounted_as
from ..locks import find_holder, locked_soon
from ..memory import available_bytes
from ..watched import TIMEOUT_S
from .decide import is_earlier, protection
from .folder_content import FOLDER, ORIGIN, FolderContent, find_copies, is_note
from .lease import leases_in
from .local_copy import LocalCopy
from .options import StageOptions

logger = logging.getLogger(__name__)

IN_MEMORY = "tmpfs", "ramfs"
FIRST_BYTES = 1 << 20  # for folders and notes, which are written before it is known how much is missing
PATIENCE_S = 10.0  # for a process that finds out whether there is room


def claim(copy: FolderContent, stack: ExitStack, job: str = "", is_locked: bool = False) -> int | None:
    """Lock a copy in order to remove it.

    Args:
        copy: Copy of any user.
        stack: Stack that unlocks it.
        job: Number of this process's job, for which the copy may be kept.
        is_locked: Whether this process has locked its folder.

    Returns:
        A descriptor of its folder, which `stack` closes; None if the copy is another user's, is in use, kept or pinned,
        if a process stages to it, or if the filesystem has no locks.
    """
    if copy.owner != os.geteuid():
        return None
    try:
        fd = os.open(copy.folder, FOLDER | os.O_NOFOLLOW)
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
    is_kept = protection(FolderContent.read(copy.folder, copy.cache), job)  # it may be kept since it was read
    return fd if is_mine and is_there and not is_kept else None


def remove(copy: FolderContent, why: str) -> bool:
    """Remove a copy, its manifest first, and its folder if that is empty then.

    Args:
        copy: Copy of any user.
        why: Reason, for the log.

    Returns:
        Whether it was removed; False if `claim` says that it may not, or something cannot be removed.
    """
    with ExitStack() as stack:
        fd = claim(copy, stack)
        return fd is not None and remove_claimed(copy, fd, why)


def remove_claimed(copy: FolderContent, fd: int, why: str, spared: str = "") -> bool:
    """Remove a copy that is claimed.

    Args:
        copy: Copy of this user.
        fd: Descriptor of `claim`.
        why: Reason, for the log.
        spared: Name of a file that stays.

    Returns:
        Whether it was removed.
    """
    names = [name for name in os.listdir(fd) if (name in copy.names or is_note(name)) and name != spared]
    names.sort(key=lambda name: (name != MANIFEST, name == ORIGIN))  # last, what shows that it is a copy
    try:
        for name in names:
            os.unlink(name, dir_fd=fd)
            if name == MANIFEST:
                os.fsync(fd)
        for folder in (copy.folder, copy.folder.parent):
            if folder != copy.cache and folder.is_relative_to(copy.cache):
                for lease in leases_in(folder):
                    if not lease.is_valid():
                        lease.path.unlink(missing_ok=True)
                with suppress(OSError):  # it is not empty
                    os.rmdir(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", copy.folder, error.strerror)
        return False
    size, used = f"{copy.size_bytes:,} bytes", time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.last_used))
    logger.info("removed %s (%s, copied from %s, last used %s): %s", copy.folder, size, copy.source, used, why)
    return True


def evictable(cache: Path, device: int, spared: Collection[Path]) -> list[FolderContent]:
    """List the copies in a cache that may be removed to make room, the least recently used first.

    Args:
        cache: Folder that contains the copies.
        device: Number of the filesystem that has too little room.
        spared: Folders of copies that are not removed, and of their sources.
    """
    copies = watched.call(lambda: find_copies(cache), TIMEOUT_S, cache)  # a filesystem may be mounted in it
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
) -> list[FolderContent]:
    """Remove copies that no process uses, the least recently used first, and no more than are needed to make room.

    Args:
        local: Folder on the filesystem where room is needed.
        cache: Folder that contains the copies.
        needed: Bytes that are to be free.
        spared: Folders as in `evictable`.
        in_part: Whether copies are removed, too, if there is not enough room without all of them.

    Returns:
        The copies that were removed.
    """
    removed: list[FolderContent] = []
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


def remove_earlier(copy: LocalCopy) -> None:
    """Remove the copies of earlier versions of a data set, beside that of its present version, that may be removed."""
    for other in find_copies(copy.target.parent):
        if is_earlier(other, copy.resolved, copy.identity) and other.digest != copy.digest:
            remove(other, f"{copy.target.name} is of a later version")


# --- room for a copy ---


def make_first_room(spared: Collection[Path], local: Path, options: StageOptions) -> None:
    """Make room for the folders and notes that are written first, on a disk that is full, if that is allowed.

    Args:
        spared: Folders that are not removed, and of their sources.
        local: Folder for the copies, which may not exist yet.
        options: Settings of staging.
    """
    cache, folder = local.absolute().parent, existing_folder(local)
    if options.evict and cache.exists() and free_bytes(folder) < FIRST_BYTES:
        evict(folder, cache, FIRST_BYTES, spared, in_part=True)


@contextmanager
def reserved_room(needed: int, spared: Collection[Path], local: Path, options: StageOptions) -> Iterator[None]:
    """Check that there is space, and make room for it if that is allowed; until this ends, no other process does so.

    Other copies that are unfinished, and that a process is at work on, keep what they still need.

    Args:
        needed: Bytes that are to be written.
        spared: Folders that are not removed, and of their sources.
        local: Folder for the bytes.
        options: Settings of staging, which say whether other copies beside `local` may be removed.

    Yields:
        Nothing; the notes are to be written that promise the room.

    Raises:
        StagingError: There is not enough space.
    """
    cache = local.absolute().parent
    with locked_soon(cache, PATIENCE_S):
        if needed:
            _make_room(needed, spared, local, cache, options)
        yield


def _make_room(needed: int, spared: Collection[Path], local: Path, cache: Path, options: StageOptions) -> None:
    promised = sum(copy.missing_bytes for copy in _others_at_work(cache, local.stat().st_dev, spared))
    if needed + promised <= (free := _free_bytes(local)):
        return
    if options.evict:
        evict(local, cache, needed + promised, spared)
        if needed + promised <= (free := _free_bytes(local)):
            return
        hint = f", and in {cache} there is not enough that nobody uses, keeps or has pinned"
    else:
        unused = sum(copy.size_bytes for copy in evictable(cache, local.stat().st_dev, spared))
        hint = f"; with --evict, copies in {cache} that nobody uses make way: {unused:,} bytes" if unused else ""
    others = f", of which {promised:,} are for copies that other processes are staging" if promised else ""
    raise StagingError(f"needs {needed:,} bytes, {free:,} are free{others}{hint}", path=local)


def _others_at_work(cache: Path, device: int, spared: Collection[Path]) -> Iterator[FolderContent]:
    """Iterate over the unfinished copies in a cache that other processes are at work on."""
    mine = {str(path.resolve()) for path in spared}
    for copy in watched.call(lambda: find_copies(cache), TIMEOUT_S, cache):
        if copy.device == device and copy.missing_bytes and str(copy.folder) not in mine:
            with suppress(FileNotFoundError):  # removed at this moment
                if find_holder(copy.folder):
                    yield copy


def _free_bytes(local: Path) -> int:
    """Return the bytes that are free there; in memory, no more than the node, and the job, have of that."""
    return min(free_bytes(local), available_bytes() if mounted_as(local) in IN_MEMORY else sys.maxsize)
