"""What is in place of some data sets, before anything is copied: folders are locked, and what is in the way goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..dataset.manifest import find_data_sets, read_content
from ..fsio import PRIVATE_MODE, make_folder
from ..streams import in_time
from .cache import CachedCopy
from .keep import hold_copy, keep_for_job
from .landing import make_own_name
from .local_copy import LocalCopy, States
from .lock import hold_lock
from .options import StageOptions
from .origin import Origin
from .space import warn_of_place
from .taking_over import (
    check_handmade,
    check_places,
    check_replaceable,
    check_slice,
    check_writable,
    find_beside,
    is_handmade,
    remove_beside,
    remove_other,
    remove_slots,
    sweep,
)


@dataclass(frozen=True)
class Prepared:
    """A copy of which it is known what is in place.

    Attributes:
        copy: of a data set.
        present: the files that are in place, see `LocalCopy.find_present`.
        is_locked: whether this process has LOCAL for itself.
        own_name: what makes temporary names this process's own, where LOCAL cannot be locked.
    """

    copy: LocalCopy
    present: States
    is_locked: bool
    own_name: str

    def complete(self, holds: ExitStack, patience_s: float) -> None:
        """Make the folder a data set, of which all files are there, and hold it, so that nobody removes it.

        Args:
            holds: lets it go.
            patience_s: how long to wait for a process that has it for itself, in seconds.

        Raises:
            EvictedError: it was removed, to make room, since it was found to be in place.
        """
        is_new = self.is_locked or bool(self.own_name)
        if is_new:
            self.copy.complete(self.present, is_new)
        holds.enter_context(hold_copy(self.copy.target, patience_s))
        if not is_new:
            self.copy.complete(self.present, is_new)
        self.copy.touch()


def list_copies(source: Path, local: Path) -> list[LocalCopy]:
    """List the data sets at `source` (itself, or its splits), and where in `local` their copies belong.

    Raises ManifestError when there is none.
    """
    folders = find_data_sets(source)
    if folders == [source]:
        return [replace(LocalCopy.of_content(source, local, read_content(source)), splits=())]
    copies = [LocalCopy.of_content(path, local / path.name, read_content(path)) for path in folders]
    return [replace(copy, splits=tuple(path.name for path in folders)) for copy in copies]


def check(
    source: Path,
    local: Path,
    copies: list[LocalCopy],
    options: StageOptions,
    checks_beside: bool = True,
    is_locked: bool = False,
) -> list[CachedCopy]:
    """Check whether data sets may be copied to a folder; nothing is changed there.

    Args:
        source: the folder that the data sets are in.
        local: the folder that the copies go to.
        copies: of the data sets.
        options: how to copy.
        checks_beside: whether no other data sets may be in the folder.
        is_locked: whether this process has locked `local`.

    Returns:
        Copies that are to be removed.

    Raises:
        StagingError, SettingError: as `stage`.
    """
    in_time(lambda: check_places(source, local, copies), source, options.timeout_s)
    beside = find_beside(local, copies, options.replace) if checks_beside else []
    for copy in copies:
        copy.check_other(options.replace)
        if options.mode != "slice" and not options.replace:
            check_slice(copy)
    check_replaceable(local, copies, beside, options.evict, is_locked)
    return beside


def prepare(
    source: Path,
    local: Path,
    copies: list[LocalCopy],
    options: StageOptions,
    stack: ExitStack,
    trusts: bool = False,
    waits: bool = True,
    checks_beside: bool = True,
) -> list[Prepared]:
    """Find out what is in place, and lock the folders of copies that are not whole.

    Args:
        source: the folder that the data sets are in.
        local: the folder that the copies go to.
        copies: of the data sets.
        options: how to copy.
        stack: unlocks the folders.
        trusts: whether files that were checked since the node booted, and not changed since, count as good.
        waits: whether to wait for another process that stages to the same folder.
        checks_beside: whether no other data sets may be in the folder.

    Returns:
        what is known of each copy.

    Raises:
        BusyError: another process is staging, and `waits` is False.
        StagingError, SettingError: as `stage`.
    """
    beside = check(source, local, copies, options, checks_beside)
    make_folder(local.parent, PRIVATE_MODE)
    keep_for_job(local, options.placement.job, os.environ)
    in_place = [copy.find_present(options.timeout_s, trusts, False) if copy.has_manifest() else {} for copy in copies]
    is_whole = [len(present) == copy.num_files for copy, present in zip(copies, in_place, strict=True)]
    locks = [
        not whole and stack.enter_context(_hold_target(copy, options, waits))
        for copy, whole in zip(copies, is_whole, strict=True)
    ]
    with ExitStack() as moment:
        if checks_beside and (beside or not all(is_whole)):
            is_alone = False
            if local not in [copy.target for copy in copies]:  # who stages other data sets there waits
                is_alone = moment.enter_context(hold_lock(local, options.timeout_s, waits))
            beside = check(source, local, copies, options, is_locked=is_alone)  # other processes may have come first
            remove_beside(beside, is_alone)
            if beside:
                keep_for_job(local, options.placement.job, os.environ)  # its note may have been removed
        prepared = []
        for copy, present, whole, is_locked in zip(copies, in_place, is_whole, locks, strict=True):
            if whole:
                copy.note_splits()
                prepared.append(Prepared(copy, present, False, ""))
            else:
                prepared.append(_take_over(copy, is_locked, options, trusts))
    return prepared


@contextmanager
def _hold_target(copy: LocalCopy, options: StageOptions, waits: bool) -> Iterator[bool]:
    with suppress(FileNotFoundError):  # it is removed at this moment
        in_time(partial(warn_of_place, copy.source, copy.target), copy.source, options.timeout_s)
    with hold_lock(copy.target, options.timeout_s, waits) as is_locked:
        yield is_locked


def _take_over(copy: LocalCopy, is_locked: bool, options: StageOptions, trusts: bool) -> Prepared:
    """Find out what is in place in a folder that is locked, unless it cannot be, and remove what is not the copy's."""
    copy.check_other(options.replace)  # in the meantime, another process may have put something there
    is_theirs, was_begun = is_handmade(copy), Origin.is_begun(copy.target)
    remove_other(copy)
    present = copy.find_present(options.timeout_s, trusts, is_locked)
    check_writable(copy, present)
    if is_theirs and not options.replace:
        check_handmade(copy, present)
    if was_begun:
        sweep(copy, is_locked, present)
    if not is_theirs:
        if is_locked:
            remove_slots(copy)
        copy.write_origin(present, False, options.in_background and is_locked)
    return Prepared(copy, present, is_locked, "" if is_locked else make_own_name())
