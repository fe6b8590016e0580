"""The place that copies go to: whether it is a disk of this node, and has room."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from pathlib import Path

from ..errors import StagingError
from ..fsio import NETWORK_FILESYSTEMS, free_bytes, mounted_as
from ..memory import available_bytes
from .cache import evict, evictable
from .options import StageOptions
from .transfer import Transfer

IN_MEMORY = "tmpfs", "ramfs"
_reported: set[tuple[str, Path]] = set()  # kinds of filesystem, and folders, of which something was said
logger = logging.getLogger(__name__)


def warn_of_place(source: Path, local: Path) -> None:
    """Say so, once, where LOCAL is not on a disk of this node.

    Args:
        source: a data set.
        local: the folder for its copy, which may not exist yet.
    """
    folder = next(path for path in (local, *local.absolute().parents) if path.exists())
    kind = mounted_as(folder)
    if (place := (kind, local.absolute().parent)) in _reported:  # of the first of several splits
        return
    _reported.add(place)
    if kind in NETWORK_FILESYSTEMS:
        logger.warning("LOCAL: %s is on a shared filesystem (%s): choose a folder on the node's own disk", local, kind)
    elif kind in IN_MEMORY:
        logger.info("LOCAL: %s is in memory (%s): the node has so much less of it", local, kind)
    elif folder.stat().st_dev == source.stat().st_dev:
        logger.info("LOCAL: %s is on the same filesystem as %s", local, source)


def check_space(needed: int, files: list[Transfer], local: Path, options: StageOptions) -> None:
    """Check that there is space for what is missing of some files; make room for it if that is allowed.

    Args:
        needed: bytes that are missing.
        files: of which.
        local: where they go to.
        options: whether other copies beside `local` may be removed.

    Raises:
        StagingError: there is not enough space.
    """
    if needed:
        make_space(needed, {path.parent for file in files for path in file.paths}, local, options)


def make_space(needed: int, spared: Collection[Path], local: Path, options: StageOptions) -> None:
    """Check that there is space; make room for it if that is allowed.

    Args:
        needed: bytes.
        spared: folders that are not removed, and of what they are copied from.
        local: where the bytes go to.
        options: whether other copies beside `local` may be removed.

    Raises:
        StagingError: there is not enough space.
    """
    if needed <= (free := _free_bytes(local)):
        return
    cache = local.absolute().parent
    if options.evict:
        evict(local, cache, needed, spared)
        if needed <= (free := _free_bytes(local)):
            return
        hint = f", and in {cache} there is not enough that nobody uses, keeps or has pinned"
    else:
        unused = sum(copy.size_bytes for copy in evictable(cache, local.stat().st_dev, spared))
        hint = f"; with --evict, copies in {cache} that nobody uses make way: {unused:,} bytes" if unused else ""
    raise StagingError(f"needs {needed:,} bytes, {free:,} are free{hint}", path=local)


def _free_bytes(local: Path) -> int:
    """Return the bytes that are free there; in memory, no more than the node, and the job, have of that."""
    return min(free_bytes(local), available_bytes() if mounted_as(local) in IN_MEMORY else sys.maxsize)
