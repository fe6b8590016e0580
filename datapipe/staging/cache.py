"""The cache of a node: the copies that lie in a folder, what protects them, and which of them are removed.

A copy lies in CACHE/NAME, or CACHE/NAME/SPLIT. Only a copy is removed that has an `.origin.json` and is this user's,
and of it only the files that staging has put there. Until they are gone, this process holds the folder's lock, so that
no process stages to it, and the manifest's, so that none uses it (see lease.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS
from ..dataset.manifest import MANIFEST, Manifest, compute_digest, compute_identity, read_content
from ..errors import DatapipeError, ManifestError, WrongPathError
from ..fsio import free_bytes, list_folders
from ..watched import TIMEOUT_S
from .decide import is_earlier, protection
from .folder_content import FOLDER, ORIGIN, FolderContent, find_copies, is_note
from .lease import remove_ended

logger = logging.getLogger(__name__)


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
            with suppress(FileNotFoundError):  # it has none
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
    """Remove a copy, its manifest first, and its folder if that is empty then; `why` is for the log.

    Return whether it was removed; False if `claim` says that it may not, or something cannot be removed.
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
                remove_ended(folder)
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
        if copy.device == device and str(copy.folder) not in sources and is_evictable(copy):
            unused.append(copy)
    return unused


def is_evictable(copy: FolderContent) -> bool:
    """Return whether a copy may be removed now to make room."""
    with ExitStack() as stack:
        return claim(copy, stack) is not None


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


# --- what people and epilogs do with a cache ---


@dataclass
class Cleaned:
    """What `clean` has done.

    Attributes:
        leases: Notes of jobs that have ended.
        removed: Copies, each with the reason.
        free_bytes: Bytes that are free on the cache's filesystem now.
    """

    leases: list[Path] = field(default_factory=list)
    removed: list[tuple[FolderContent, str]] = field(default_factory=list)
    free_bytes: int = 0


def clean(cache: Path, ended: str = "", free: int = 0, timeout_s: float = TIMEOUT_S) -> Cleaned:
    """Remove from a cache what no job needs any more.

    That is: notes of jobs that have ended; copies of which the source has a later version; unfinished copies of which
    the source is gone, and not only its filesystem; then, the least recently used first, copies that nobody uses,
    until so much is free, or none is left.

    Args:
        cache: Folder that contains the copies.
        ended: Number of a job that has ended, although its time is not over.
        free: Bytes that are to be free.
        timeout_s: Longest time that reading a source may take, in seconds.

    Returns:
        What was removed, and what is free now.

    Raises:
        WrongPathError: The folder does not exist.
    """
    if not cache.is_dir():
        raise WrongPathError("is not a folder", path=cache)
    cache, done = cache.resolve(), Cleaned()
    for folder in (cache, *(level for top in list_folders(cache) for level in (top, *list_folders(top)))):
        done.leases += remove_ended(folder, ended)
    copies = find_copies(cache)
    sources = {copy.source for copy in copies}
    try:
        for copy in copies:
            if copy.owner == os.geteuid() and str(copy.folder) not in sources:
                why = _why_useless(copy, timeout_s)
                if why and remove(copy, why):
                    done.removed.append((copy, why))
    except DatapipeError as error:  # it hangs; no other source is asked: an epilog has little time
        logger.warning("%s: what has become useless is not known", error)
    done.removed += [(copy, "to make room") for copy in evict(cache, cache, free, in_part=True)]
    done.free_bytes = free_bytes(cache)
    return done


def _why_useless(copy: FolderContent, timeout_s: float) -> str:
    """Say why no process will use a copy again; "" if that is not known. Raises DatapipeError if its source hangs."""
    source = Path(copy.source)

    def look() -> str:
        beside = os.listdir(source.parent)
        if beside and source.name not in beside:  # an empty folder is where a filesystem was mounted
            return "" if copy.is_whole else "it is unfinished, and its source is gone"
        content = read_content(source)
        identity = compute_identity(Manifest.parse(content, source / MANIFEST))
        is_later = compute_digest(content) != copy.digest and is_earlier(copy, source, identity)
        return "its source has a later version" if is_later else ""

    try:
        return watched.call(look, timeout_s, source)
    except (ManifestError, OSError):  # it is not mounted
        return ""
