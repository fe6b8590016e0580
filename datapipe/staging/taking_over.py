"""A folder that something lies in already: what may be removed there, and what somebody else's is."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ..dataset.arriving import KINDS, temporary_path
from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST
from ..errors import SettingError, StagingError
from ..fsio import sync_folder
from .keep import is_pinned
from .landing import is_of_dead_process
from .local_copy import LocalCopy
from .lock import hold_unused
from .origin import ORIGIN, Origin

logger = logging.getLogger(__name__)


def check_place(source: Path, local: Path) -> None:
    """Raise SettingError where nothing can be staged to a folder.

    Args:
        source: the folder that the data sets are in.
        local: the folder that the copies go to.
    """
    if local.resolve().is_relative_to(source.resolve()):
        raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
    if source.resolve().is_relative_to(local.resolve()):
        raise SettingError(f"LOCAL: {source} lies in {local}, which would become a copy of it; choose another")
    if local.is_file():
        raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")


def check_slice(copy: LocalCopy) -> None:
    """Raise StagingError where a folder has room for a part only: all of the data set may be more than its disk."""
    try:
        is_slice = Origin.read(copy.target).capacity_bytes > 0
    except StagingError:
        return
    if is_slice:
        message = "has room for a part of a data set: give --mode slice, or --replace to copy all of it"
        raise StagingError(message, path=copy.target)


def names_there(copy: LocalCopy) -> list[str]:
    """List the manifest and files of a data set that are in the folder of its copy, whatever they hold."""
    names = MANIFEST, *(file.name for file in copy.manifest.all_files())
    return [name for name in names if os.path.lexists(copy.target / name)]


def is_handmade(copy: LocalCopy) -> bool:
    """Return whether somebody, and not staging, has put files of the data set there.

    Such a folder gets no `.origin.json`, so that it is never removed to make room.
    """
    return bool(names_there(copy)) and not (copy.target / ORIGIN).exists()  # in that order: staging begins with it


def check_handmade(copy: LocalCopy, present: Collection[str]) -> None:
    """Raise StagingError where a folder that somebody has made holds something else under a name of the data set's.

    Args:
        copy: of the data set.
        present: names of the files that are in place.
    """
    for name in names_there(copy):
        if not (copy.has_manifest() if name == MANIFEST else name in present):
            message = "is not the data set's, and not staging's; choose another folder, or replace it with --replace"
            raise StagingError(message, path=copy.target / name)


def remove_other(copy: LocalCopy) -> None:
    """Remove what another data set has in a folder and this one has not. Its manifest goes first.

    Raises StagingError where somebody uses it, or it is pinned.
    """
    other = copy.other_manifest()
    names = [] if other is None else [file.name for file in other.all_files()]
    with suppress(StagingError):  # of one that was begun and has no manifest yet
        names += [os.path.basename(name) for name in Origin.read(copy.target).files]
    extra = {*names} - {file.name for file in copy.manifest.all_files()}
    if other is None and not extra:
        return
    if is_pinned(copy.target) or is_pinned(copy.target.parent):
        raise StagingError("is pinned: unpin it, or choose another folder", path=copy.target)
    with hold_unused(copy.target / MANIFEST):
        logger.info("%s holds another version of the data set, or another data set: replacing it", copy.target)
        (copy.target / MANIFEST).unlink(missing_ok=True)
        sync_folder(copy.target)
        for name in extra:
            (copy.target / name).unlink(missing_ok=True)


def remove_slots(copy: LocalCopy) -> None:
    """Remove slots for a part of a data set. Raises StagingError where somebody uses them."""
    with hold_unused(copy.target / SLOTS):
        for name in (TAGS, SLOTS):
            (copy.target / name).unlink(missing_ok=True)


def sweep(copy: LocalCopy, is_locked: bool, present: Collection[str]) -> None:
    """Remove temporary files that nobody will continue, from a folder that has an `.origin.json`.

    Args:
        copy: of a data set.
        is_locked: whether no other process is at work here. Where that is not known, only files go whose process,
            as their names tell, was on this host and has ended.
        present: names of the files that are in place.
    """
    files = [copy.target / file.name for file in copy.manifest.all_files() if file.name not in present]
    continued = {temporary_path(file, kind) for file in files for kind in KINDS}
    for path in {path for kind in KINDS for path in copy.target.glob(f".*.{kind}")} - continued:
        if is_locked or is_of_dead_process(path):
            path.unlink(missing_ok=True)
