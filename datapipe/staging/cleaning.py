"""What people and epilogs do with a cache: look at it, and remove from it what nobody needs."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import watched
from ..dataset.block_slots import SLOTS
from ..dataset.manifest import MANIFEST, Manifest, read_content
from ..errors import DatapipeError, ManifestError, StagingError, WrongPathError
from ..foreign import user_name
from ..fsio import atomic_write, free_bytes
from ..locks import lock_holders
from ..watched import TIMEOUT_S
from .cache import claim, evict, remove
from .decide import is_earlier
from .folder_content import ORIGIN, FolderContent, compute_digest, compute_identity, find_copies, subfolders
from .lease import PINNED, leases_in

logger = logging.getLogger(__name__)


def describe(cache: Path) -> list[dict[str, Any]]:
    """Return what `datapipe cache list` tells of each copy in a cache, as JSON values.

    Raises WrongPathError if the folder does not exist.
    """
    if not cache.is_dir():
        raise WrongPathError("is not a folder", path=cache)
    return [
        {
            "folder": str(copy.folder),
            "source": copy.source,
            "owner": user_name(copy.owner),
            "size_bytes": copy.size_bytes,
            "last_used": copy.last_used,
            "in_use": [its for name in (MANIFEST, SLOTS) for its in _processes(copy.folder / name, shared=True)],
            "staging": _processes(copy.folder, shared=False),
            "kept": [{"job": its.job, "host": its.process.host, "until": its.until} for its in copy.leases],
            "pinned": copy.is_pinned,
            "unfinished": not copy.is_whole,
            "evictable": _is_evictable(copy),
        }
        for copy in find_copies(cache)
    ]


def _processes(path: Path, shared: bool) -> list[dict[str, Any]]:
    """List the processes that hold a lock, or also those that share it, as far as they can be seen from here."""
    processes = []
    with suppress(OSError):
        for pid in lock_holders(path, shared):
            with suppress(OSError):
                folder = Path("/proc", str(pid))
                name, user = (folder / "comm").read_text().strip(), user_name(folder.stat().st_uid)
                processes.append({"pid": pid, "name": name, "user": user})
    return processes


def _is_evictable(copy: FolderContent) -> bool:
    with ExitStack() as stack:
        return claim(copy, stack) is not None


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
    for folder in (cache, *(level for top in subfolders(cache) for level in (top, *subfolders(top)))):
        for lease in leases_in(folder):
            if not lease.is_valid() or lease.job == ended:
                with suppress(OSError):  # it is another user's
                    lease.path.unlink()
                    done.leases.append(lease.path)
    copies = find_copies(cache)
    sources = {copy.source for copy in copies}
    hanging = False  # then no other source is asked: an epilog has little time
    for copy in copies:
        if copy.owner == os.geteuid() and str(copy.folder) not in sources and not hanging:
            try:
                why = _why_useless(copy, timeout_s)
            except DatapipeError as error:
                hanging, why = True, ""
                logger.warning("%s: what has become useless is not known", error)
            if why and remove(copy, why):
                done.removed.append((copy, why))
    done.removed += [(copy, "to make room") for copy in evict(cache, cache, free, in_part=True)]
    done.free_bytes = free_bytes(cache)
    return done


def _why_useless(copy: FolderContent, timeout_s: float) -> str:
    """Say why no process will use a copy again; "" if that is not known. Raises DatapipeError if its source hangs."""
    source = Path(copy.source)

    def read() -> bytes | None:
        """Return the manifest of the source; b"" if it is gone, None if that is not known."""
        with suppress(ManifestError, OSError):  # it is not mounted
            beside = os.listdir(source.parent)
            if beside and source.name not in beside:  # an empty folder is where a filesystem was mounted
                return b""
            return read_content(source)
        return None

    content = watched.call(read, timeout_s, source)
    if content is None:
        return ""
    if not content:
        return "" if copy.is_whole else "it is unfinished, and its source is gone"
    with suppress(ManifestError):
        identity = compute_identity(Manifest.parse(content, source / MANIFEST))
        if compute_digest(content) != copy.digest and is_earlier(copy, source, identity):
            return "its source has a later version"
    return ""


def pin(local: Path) -> None:
    """Keep the copies in a folder until they are unpinned. Raises StagingError where there is none of this user's."""
    _check_own(local)
    if not any(local.glob(ORIGIN)) and not any(local.glob(f"*/{ORIGIN}")):
        raise StagingError("is not a copy, and holds none", path=local)
    with atomic_write(local / PINNED, alone=False, is_own=True):
        pass


def unpin(local: Path) -> None:
    """Undo `pin`. Raises StagingError for another user's folder, and for one that is not pinned itself."""
    _check_own(local)
    try:
        (local / PINNED).unlink()
    except FileNotFoundError as error:
        raise StagingError("is not pinned", path=local) from error


def _check_own(local: Path) -> None:
    if not local.is_dir():
        raise WrongPathError("is not a folder", path=local)
    if (owner := local.stat().st_uid) != os.geteuid():
        raise StagingError(f"is user {user_name(owner)}'s: only that user can pin or unpin it", path=local)
