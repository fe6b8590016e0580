"""Whether data sets may be copied to a folder, and what would make way for them; nothing is changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS
from ..dataset.manifest import MANIFEST
from ..errors import SettingError, StagingError
from ..foreign import check_folder
from ..fsio import NETWORK_FILESYSTEMS, existing_folder, free_bytes, mounted_as
from ..locks import hold_unused
from .cache import IN_MEMORY, claim
from .decide import Decision, Refuse, Replace, decide, decide_beside
from .folder_content import FolderContent
from .local_copy import LocalCopy
from .options import StageOptions

logger = logging.getLogger(__name__)

_reported: set[tuple[str, Path]] = set()  # kinds of filesystem, and folders, of which something was said


def check_place(source: Path, local: Path) -> None:
    """Raise SettingError if nothing can be staged to a folder, StagingError if others could change the copy.

    Args:
        source: Folder that contains the data sets.
        local: Folder for the copies.
    """
    if local.resolve().is_relative_to(source.resolve()):
        raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
    if source.resolve().is_relative_to(local.resolve()):
        raise SettingError(f"LOCAL: {source} lies in {local}, which would become a copy of it; choose another")
    if local.is_file():
        raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")
    check_folder(local)


def check(
    source: Path,
    local: Path,
    copies: Sequence[LocalCopy],
    options: StageOptions,
    checks_beside: bool = True,
    is_locked: bool = False,
    is_part: Callable[[LocalCopy], bool] = lambda _: False,
) -> tuple[list[Decision], list[FolderContent]]:
    """Check whether data sets may be copied to a folder.

    Args:
        source: Folder that contains the data sets.
        local: Folder for the copies.
        copies: Copies of the data sets.
        options: Settings of staging.
        checks_beside: Whether no other data sets may be in the folder.
        is_locked: Whether this process has locked `local`.
        is_part: Whether a copy is to be slots for a part.

    Returns:
        What is to be done in each copy's folder, and copies that are to be removed.

    Raises:
        StagingError, SettingError: What `stage` raises.
    """
    watched.call(partial(_check_places, source, local, copies), options.timeout_s, source)
    beside = [*_read_beside(local, copies)] if checks_beside else []
    beside_decisions = [decide_beside(content, local, is_inside, options) for content, is_inside in beside]
    contents = [copy.read_folder() for copy in copies]
    decisions = [
        decide(content, copy, options, is_part=is_part(copy)) for content, copy in zip(contents, copies, strict=True)
    ]
    for decision in (*beside_decisions, *decisions):
        if isinstance(decision, Refuse):
            raise StagingError(decision.why, path=decision.path)
    in_the_way = [c for (c, _), decision in zip(beside, beside_decisions, strict=True) if isinstance(decision, Replace)]
    replaced = [c for c, decision in zip(contents, decisions, strict=True) if isinstance(decision, Replace)]
    if replaced or in_the_way:
        with ExitStack() as stack:  # for a moment
            claim_all(in_the_way, replaced, local, options, is_locked, stack)
        freed = sum(content.size_bytes for content in (*replaced, *in_the_way))
        needed = sum(
            copy.manifest.size_bytes
            for copy, content in zip(copies, contents, strict=True)
            if (content in replaced or content.digest != copy.digest) and not is_part(copy)
        )
        free = free_bytes(existing_folder(local))
        if needed > free + freed and not options.evict:
            message = f"needs {needed:,} bytes; {free:,} are free, and {freed:,} with what would be replaced"
            raise StagingError(message, path=local)
    return decisions, in_the_way


def _check_places(source: Path, local: Path, copies: Sequence[LocalCopy]) -> None:
    check_place(source, local)
    for copy in copies:
        check_place(copy.source, copy.target)


def _read_beside(local: Path, copies: Sequence[LocalCopy]) -> Iterator[tuple[FolderContent, bool]]:
    """Read the folders that readers of LOCAL, or of what it lies in, could take for its splits; say which are in it."""
    local, targets = local.absolute(), {copy.target.absolute() for copy in copies}
    folders = {local, *(target.parent for target in targets)}
    folders |= {folder for path in targets | {local} for folder in _folders_in(path)}
    for folder in sorted(folders - targets):
        if folder == local:  # a link is followed only if the user has named it
            yield FolderContent.read(folder.resolve(), folder.resolve()), True
        else:
            content = FolderContent.read(folder, folder.parent, follows=folder.is_symlink())
            yield content, folder.is_relative_to(local)


def _folders_in(folder: Path) -> Iterator[Path]:
    """Iterate over the folders in a folder, and links to such."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir():
                    yield folder / entry.name


def claim_all(
    beside: Sequence[FolderContent],
    replaced: Sequence[FolderContent],
    local: Path,
    options: StageOptions,
    is_locked: bool,
    stack: ExitStack,
) -> list[int]:
    """Make sure that no process uses what is to be removed.

    Args:
        beside: Copies of other data sets.
        replaced: Folders of the copies in which another data set is.
        local: Folder for the copies that are staged.
        options: Settings of staging.
        is_locked: Whether this process has locked `local`.
        stack: Stack that lets them go.

    Returns:
        Descriptors of the folders of `beside`.

    Raises:
        StagingError: One is in use, pinned, kept or another user's.
    """
    fds = []
    for content in beside:
        fd = claim(content, stack, options.placement.job, is_locked and content.folder == local.resolve())
        if fd is None:
            message = "is in the way, and in use, pinned, kept for a job, or another user's; choose another folder"
            raise StagingError(message, path=content.folder)
        fds.append(fd)
    for content in replaced:
        for name in (MANIFEST, SLOTS):
            stack.enter_context(hold_unused(content.folder / name))
    return fds


def warn_of_place(source: Path, local: Path) -> None:
    """Say so, once, if LOCAL is not on a disk of this node.

    Args:
        source: Folder of a data set.
        local: Folder for its copy, which may not exist yet.
    """
    folder = existing_folder(local)
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
