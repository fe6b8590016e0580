"""A folder that something lies in already: what may be removed there, and what somebody else's is."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from ..console import format_count
from ..dataset.arriving import KINDS, temporary_path
from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST, Manifest, read_content
from ..errors import ManifestError, SettingError, StagingError
from ..foreign import check_folder, user_name
from ..fsio import free_bytes, sync_folder
from .cache import CachedCopy, claim, remove_claimed
from .keep import is_pinned
from .landing import is_of_dead_process
from .local_copy import LocalCopy
from .lock import hold_unused
from .origin import ORIGIN, Origin
from .progress import LOG

logger = logging.getLogger(__name__)


def check_place(source: Path, local: Path) -> None:
    """Raise SettingError where nothing can be staged to a folder, StagingError where others could change the copy.

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
    check_folder(local)


def check_places(source: Path, local: Path, copies: list[LocalCopy]) -> None:
    """Do what `check_place` does, for all data sets.

    Args:
        source: the folder that they are in.
        local: the folder that their copies go to.
        copies: of each.
    """
    check_place(source, local)
    for copy in copies:
        check_place(copy.source, copy.target)


def find_beside(local: Path, copies: list[LocalCopy], may_replace: bool) -> list[CachedCopy]:
    """Find what stands in the way of data sets: other ones, which readers of the folder would take for their splits.

    Copies of `cache=`, which have a digest in their names, do not.

    Args:
        local: the folder that their copies go to.
        copies: of all of them.
        may_replace: whether copies of other data sets may be removed.

    Returns:
        Copies that are to be removed.

    Raises:
        StagingError: there is something that may not be removed.
    """
    local, targets = local.absolute(), {copy.target.absolute() for copy in copies}
    folders = {local, *(target.parent for target in targets)}
    folders |= {folder for path in targets | {local} for folder in _folders_in(path)}
    beside = []
    for folder in sorted(folders - targets):
        # A link is followed only where the user has named it.
        real = folder.resolve() if folder == local else folder
        other = CachedCopy.read(real, real if folder == local else real.parent)
        if (other is None and not _is_data_set(folder)) or (other is not None and other.has_name_of_cache()):
            continue
        if other is None or not folder.is_relative_to(local):
            raise StagingError(f"is a data set: {local} cannot be a copy as well; choose another", path=folder)
        if not may_replace:
            message = f"is a copy of {other.source}, which is not to be in {local}"
            raise StagingError(f"{message}; choose another folder, or remove it with --replace", path=folder)
        beside.append(other)
    return beside


def remove_beside(copies: list[CachedCopy], is_locked: bool) -> None:
    """Remove what `find_beside` has found: all of it, or nothing.

    Args:
        copies: to be removed.
        is_locked: whether this process has locked LOCAL, which may be one of them.

    Raises:
        StagingError: one is in use, pinned, or another user's.
    """
    with ExitStack() as stack:
        for copy, fd in [(copy, _claim(copy, stack, is_locked)) for copy in copies]:
            spared = LOG if copy.folder == copy.cache else ""  # which this process may be writing
            if not remove_claimed(copy, fd, "it is in the way of another data set", spared):
                raise StagingError("is in the way, and cannot be removed", path=copy.folder)


def _claim(copy: CachedCopy, stack: ExitStack, is_locked: bool) -> int:
    fd = claim(copy, stack, True, is_locked and copy.folder == copy.cache)
    if fd is None:
        message = "is in the way, and in use, pinned, or another user's; choose another folder"
        raise StagingError(message, path=copy.folder)
    return fd


def check_replaceable(
    local: Path, copies: list[LocalCopy], beside: list[CachedCopy], evicts: bool, is_locked: bool
) -> None:
    """Check what can be known of a replacement before anything is removed; nothing is changed.

    Args:
        local: the folder that the copies go to.
        copies: of all data sets.
        beside: of `find_beside`.
        evicts: whether still other copies may make room.
        is_locked: whether this process has locked `local`.

    Raises:
        StagingError: something is in use or pinned, or there will be no room.
    """
    for copy in copies:
        for name in names_there(copy):
            if (copy.target / name).is_dir():
                raise StagingError("is a folder; remove it, or choose another folder", path=copy.target / name)
    others = [copy for copy in copies if _other_names(copy) is not None]
    if not beside and not others:
        return
    with ExitStack() as stack:
        if beside and is_pinned(local):
            raise StagingError("is pinned: unpin it, or choose another folder", path=local)
        for other in beside:
            _claim(other, stack, is_locked)
        for copy in others:
            _check_unpinned(copy)
            stack.enter_context(hold_unused(copy.target / MANIFEST))
    freed = sum(copy.size_bytes for copy in beside) + sum(map(_size_there, others))
    needed = sum(copy.manifest.size_bytes for copy in copies if copy in others or not copy.is_named())
    free = free_bytes(next(path for path in (local, *local.absolute().parents) if path.exists()))
    if needed > free + freed and not evicts:
        message = f"needs {needed:,} bytes; {free:,} are free, and {freed:,} with what would be replaced"
        raise StagingError(message, path=local)


def _size_there(copy: LocalCopy) -> int:
    """Return the bytes that the files in a copy's folder take."""
    with suppress(OSError), os.scandir(copy.target) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    return 0


def _check_unpinned(copy: LocalCopy) -> None:
    if is_pinned(copy.target) or is_pinned(copy.target.parent):
        raise StagingError("is pinned: unpin it, or choose another folder", path=copy.target)


def _folders_in(folder: Path) -> Iterator[Path]:
    """Iterate over the folders in a folder, and links to such."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir():
                    yield folder / entry.name


def _is_data_set(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file() and bool(Manifest.parse(read_content(folder), folder / MANIFEST))
    except (ManifestError, OSError):
        return False


def check_slice(copy: LocalCopy) -> None:
    """Raise StagingError where a folder has room for a part only: all of the data set may be more than its disk."""
    try:
        is_slice = Origin.read(copy.target).capacity_bytes > 0
    except StagingError:
        return
    if is_slice:
        message = "has room for a part of a data set: give --mode slice, or --replace to copy all of it"
        raise StagingError(message, path=copy.target)


def check_writable(copy: LocalCopy, present: Collection[str]) -> None:
    """Raise StagingError where files are missing in a folder that this user may not write to.

    Args:
        copy: of the data set.
        present: names of the files that are in place.
    """
    if len(present) < copy.num_files and not os.access(copy.target, os.W_OK):
        missing = [file.name for file in copy.manifest.all_files() if file.name not in present]
        message = f"is user {user_name(copy.target.stat().st_uid)}'s, which this user cannot write to"
        example = f"{format_count(len(missing), 'file is', 'files are')} missing or damaged there, such as {missing[0]}"
        raise StagingError(f"{message}, and {example}; choose another folder", path=copy.target)


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
            message = "is not the data set's, and not staging's; choose another folder"
            is_file = not (copy.target / name).is_dir()
            raise StagingError(message + (", or replace it with --replace" if is_file else ""), path=copy.target / name)


def remove_other(copy: LocalCopy) -> None:
    """Remove what another data set has in a folder and this one has not. Its manifest goes first.

    Raises StagingError where somebody uses it, or it is pinned.
    """
    extra = _other_names(copy)
    if extra is None:
        return
    _check_unpinned(copy)
    with hold_unused(copy.target / MANIFEST):
        logger.info("%s holds another version of the data set, or another data set: replacing it", copy.target)
        (copy.target / MANIFEST).unlink(missing_ok=True)
        sync_folder(copy.target)
        for name in extra:
            (copy.target / name).unlink(missing_ok=True)


def _other_names(copy: LocalCopy) -> set[str] | None:
    """Return the files that another data set has in a folder and this one has not; None where no other is there."""
    other = copy.other_manifest()
    names = [] if other is None else [file.name for file in other.all_files()]
    with suppress(StagingError):  # of one that was begun and has no manifest yet
        names += [os.path.basename(name) for name in Origin.read(copy.target).files]
    extra = {*names} - {file.name for file in copy.manifest.all_files()}
    return None if other is None and not extra else extra


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
