"""Whether data sets may be copied to a folder, what would make way for them, and whether there is room."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS
from ..dataset.manifest import MANIFEST
from ..errors import SettingError, StagingError
from ..foreign import check_folder
from ..fsio import NETWORK_FILESYSTEMS, existing_folder, free_bytes, list_folders, mounted_as
from ..locks import find_holder, hold_unused, locked_soon
from ..memory import available_bytes
from ..watched import TIMEOUT_S
from .cache import claim, evict, evictable
from .decide import Decision, Refuse, Replace, decide, decide_beside
from .folder_content import FolderContent, find_copies
from .options import Request

logger = logging.getLogger(__name__)

_IN_MEMORY = "tmpfs", "ramfs"
_FIRST_BYTES = 1 << 20  # for folders and notes, which are written before it is known how much is missing
_PATIENCE_S = 10.0  # for a process that finds out whether there is room
_reported: set[tuple[str, Path]] = set()  # kinds of filesystem, and folders, of which something was said


def check(request: Request, is_locked: bool = False) -> tuple[list[Decision], list[FolderContent]]:
    """Check whether data sets may be copied to a folder; nothing is changed.

    Args:
        request: Data sets, and the folder.
        is_locked: Whether this process has locked the folder.

    Returns:
        What is to be done in each copy's folder, and copies that are to be removed. Raises what `stage` raises.
    """
    options = request.options
    watched.call(partial(_check_places, request), options.timeout_s, request.source)
    beside = [*_read_beside(request)] if request.checks_beside else []
    beside_decisions = [decide_beside(content, request.local, is_inside, options) for content, is_inside in beside]
    contents = [copy.read_folder() for copy in request.copies]
    decisions = [
        decide(content, copy, options, is_part=copy is request.part)
        for content, copy in zip(contents, request.copies, strict=True)
    ]
    raise_refusal(*beside_decisions, *decisions)
    in_the_way = [c for (c, _), decision in zip(beside, beside_decisions, strict=True) if isinstance(decision, Replace)]
    replaced = [c for c, decision in zip(contents, decisions, strict=True) if isinstance(decision, Replace)]
    if replaced or in_the_way:
        _check_removal(request, contents, replaced, in_the_way, is_locked)
    return decisions, in_the_way


def raise_refusal(*decisions: Decision) -> None:
    """Raise StagingError for the first decision that nothing can be done."""
    for decision in decisions:
        if isinstance(decision, Refuse):
            raise StagingError(decision.why, path=decision.path)


def _check_places(request: Request) -> None:
    """Raise SettingError if nothing can be staged to a folder, StagingError if others could change the copy."""
    for source, local in ((request.source, request.local), *((copy.source, copy.target) for copy in request.copies)):
        if local.resolve().is_relative_to(source.resolve()):
            raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
        if source.resolve().is_relative_to(local.resolve()):
            raise SettingError(f"LOCAL: {source} lies in {local}, which would become a copy of it; choose another")
        if local.is_file():
            raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")
        check_folder(local)


def _read_beside(request: Request) -> Iterator[tuple[FolderContent, bool]]:
    """Read the folders that readers of LOCAL, or of what it lies in, could take for its splits; say which are in it."""
    local, targets = request.local.absolute(), {copy.target.absolute() for copy in request.copies}
    folders = {local, *(target.parent for target in targets)}
    folders |= {folder for path in targets | {local} for folder in list_folders(path, follows=True)}
    for folder in sorted(folders - targets):
        if folder == local:  # a link is followed only if the user has named it
            yield FolderContent.read(folder.resolve(), folder.resolve()), True
        else:
            content = FolderContent.read(folder, folder.parent, follows=folder.is_symlink())
            yield content, folder.is_relative_to(local)


def _check_removal(
    request: Request,
    contents: Sequence[FolderContent],
    replaced: Sequence[FolderContent],
    in_the_way: Sequence[FolderContent],
    is_locked: bool,
) -> None:
    """Raise StagingError if something must not be removed, or there were too little room even then."""
    with ExitStack() as stack:  # for a moment
        claim_all(request, in_the_way, replaced, is_locked, stack)
    freed = sum(content.size_bytes for content in (*replaced, *in_the_way))
    needed = sum(
        copy.manifest.size_bytes
        for copy, content in zip(request.copies, contents, strict=True)
        if (content in replaced or content.digest != copy.digest) and copy is not request.part
    )
    free = free_bytes(existing_folder(request.local))
    if needed > free + freed and not request.options.evict:
        message = f"needs {needed:,} bytes; {free:,} are free, and {freed:,} with what would be replaced"
        raise StagingError(message, path=request.local)


def claim_all(
    request: Request,
    beside: Sequence[FolderContent],
    replaced: Sequence[FolderContent],
    is_locked: bool,
    stack: ExitStack,
) -> list[int]:
    """Make sure that no process uses what is to be removed.

    Args:
        request: Data sets that it makes way for.
        beside: Copies of other data sets.
        replaced: Folders of the copies in which another data set is.
        is_locked: Whether this process has locked the request's folder.
        stack: Stack that lets them go.

    Returns:
        Descriptors of the folders of `beside`.

    Raises:
        StagingError: One is in use, pinned, kept or another user's.
    """
    fds = []
    for content in beside:
        is_own_lock = is_locked and content.folder == request.local.resolve()
        fd = claim(content, stack, request.options.placement.job, is_own_lock)
        if fd is None:
            message = "is in the way, and in use, pinned, kept for a job, or another user's; choose another folder"
            raise StagingError(message, path=content.folder)
        fds.append(fd)
    for content in replaced:
        for name in (MANIFEST, SLOTS):
            stack.enter_context(hold_unused(content.folder / name))
    return fds


def warn_of_place(source: Path, local: Path) -> None:
    """Say so, once, if LOCAL, the folder for a copy, which may not exist yet, is not on a disk of this node."""
    folder = existing_folder(local)
    kind = mounted_as(folder)
    if (place := (kind, local.absolute().parent)) in _reported:  # of the first of several splits
        return
    _reported.add(place)
    if kind in NETWORK_FILESYSTEMS:
        logger.warning("LOCAL: %s is on a shared filesystem (%s): choose a folder on the node's own disk", local, kind)
    elif kind in _IN_MEMORY:
        logger.info("LOCAL: %s is in memory (%s): the node has so much less of it", local, kind)
    elif folder.stat().st_dev == source.stat().st_dev:
        logger.info("LOCAL: %s is on the same filesystem as %s", local, source)


# --- room for the copies ---


def make_first_room(request: Request) -> None:
    """Make room for the folders and notes that are written first, on a disk that is full, if that is allowed."""
    folder = existing_folder(request.local)
    if request.options.evict and request.cache.exists() and free_bytes(folder) < _FIRST_BYTES:
        evict(folder, request.cache, _FIRST_BYTES, request.spared, in_part=True)


@contextmanager
def reserved_room(request: Request, needed: int) -> Iterator[None]:
    """Check that there is space, and make room for it if that is allowed; until this ends, no other process does so.

    Other copies that are unfinished, and that a process is at work on, keep what they still need. In the body of
    `with`, the notes are to be written that promise the room. Raises StagingError when there is not enough.
    """
    with locked_soon(request.cache, _PATIENCE_S):
        if needed:
            _make_room(request, needed)
        yield


def _make_room(request: Request, needed: int) -> None:
    local, cache = request.local, request.cache
    promised = sum(copy.missing_bytes for copy in _others_at_work(request))
    if needed + promised <= (free := _free_bytes(local)):
        return
    if request.options.evict:
        evict(local, cache, needed + promised, request.spared)
        if needed + promised <= (free := _free_bytes(local)):
            return
        hint = f", and in {cache} there is not enough that nobody uses, keeps or has pinned"
    else:
        unused = sum(copy.size_bytes for copy in evictable(cache, local.stat().st_dev, request.spared))
        hint = f"; with --evict, copies in {cache} that nobody uses make way: {unused:,} bytes" if unused else ""
    others = f", of which {promised:,} are for copies that other processes are staging" if promised else ""
    raise StagingError(f"needs {needed:,} bytes, {free:,} are free{others}{hint}", path=local)


def _others_at_work(request: Request) -> Iterator[FolderContent]:
    """Iterate over the unfinished copies in the cache that other processes are at work on."""
    device, mine = request.local.stat().st_dev, {str(path.resolve()) for path in request.spared}
    for copy in watched.call(lambda: find_copies(request.cache), TIMEOUT_S, request.cache):
        if copy.device == device and copy.missing_bytes and str(copy.folder) not in mine and find_holder(copy.folder):
            yield copy


def _free_bytes(local: Path) -> int:
    """Return the bytes that are free there; in memory, no more than the node, and the job, have of that."""
    return min(free_bytes(local), available_bytes() if mounted_as(local) in _IN_MEMORY else sys.maxsize)
