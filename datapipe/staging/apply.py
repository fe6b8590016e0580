"""Make folders ready for the copies of some data sets: what lies there is read and decided on, locked, and done."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST
from ..dataset.partial_reader import KINDS, PARTIAL, temporary_path
from ..errors import StagingError
from ..fsio import PRIVATE_MODE, boot_id, make_folder, sync_folder
from ..locks import hold_lock, hold_unused
from .cache import make_first_room, remove_claimed, reserved_room
from .check import check, claim_all, warn_of_place
from .decide import Decision, Keep, Refuse, Replace, decide, is_handmade
from .folder_content import LOG, FolderContent
from .lease import hold_copy, keep_for_job
from .local_copy import LocalCopy, States
from .options import StageOptions
from .partial_file import is_of_dead_process, make_own_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A copy of which it is known what is in place.

    Attributes:
        copy: Copy of a data set.
        present: Files that are in place, see `LocalCopy.find_present`.
        is_locked: Whether this process has LOCAL for itself.
        own_name: Word that makes temporary names this process's own, if LOCAL cannot be locked.
    """

    copy: LocalCopy
    present: States
    is_locked: bool
    own_name: str

    def complete(self, holds: ExitStack, patience_s: float) -> None:
        """Make the folder a data set, of which all files are there, and hold it, so that no process removes it.

        Args:
            holds: Stack that lets it go.
            patience_s: Longest time to wait for a process that has it for itself, in seconds.

        Raises:
            EvictedError: It was removed, to make room, since it was found to be in place.
        """
        is_new = self.is_locked or bool(self.own_name)
        if is_new:
            self.copy.complete(self.present, is_new)
        holds.enter_context(closing(hold_copy(self.copy.target, patience_s)))
        if not is_new:
            self.copy.complete(self.present, is_new)
        self.copy.touch()


def prepare(
    source: Path,
    local: Path,
    copies: Sequence[LocalCopy],
    options: StageOptions,
    stack: ExitStack,
    trusts: bool = False,
    waits: bool = True,
    checks_beside: bool = True,
) -> list[Prepared]:
    """Find out what is in place; lock the folders of copies that are not whole, and make room for them.

    Args:
        source: Folder that contains the data sets.
        local: Folder for the copies.
        copies: Copies of the data sets.
        options: Settings of staging.
        stack: Stack that unlocks the folders. If an error ends it, the copies are no longer kept for the job.
        trusts: Whether files that were checked since the node booted, and not changed since, count as good.
        waits: Whether to wait for another process that stages to the same folder.
        checks_beside: Whether no other data sets may be in the folder.

    Returns:
        What is known of each copy.

    Raises:
        BusyError: Another process is staging, and `waits` is False.
        StagingError, SettingError: What `stage` raises.
    """
    decisions, beside = check(source, local, copies, options, checks_beside)
    spared = {path for copy in copies for path in (copy.source, copy.target)}
    make_first_room(spared, local, options)
    make_folder(local.parent, PRIVATE_MODE)
    wholes = [
        _find_whole(copy, decision, options, stack, trusts, waits)
        for copy, decision in zip(copies, decisions, strict=True)
    ]
    locks = [
        whole is None and stack.enter_context(_hold_target(copy, options, waits))
        for copy, whole in zip(copies, wholes, strict=True)
    ]
    unfinished = [copy for copy, whole in zip(copies, wholes, strict=True) if whole is None]
    with ExitStack() as moment:
        if beside or unfinished:
            is_alone = False
            if checks_beside and local not in [copy.target for copy in copies]:
                is_alone = moment.enter_context(hold_lock(local, options.timeout_s, waits))
            # Other processes may have come first.
            decisions, beside = check(source, local, copies, options, checks_beside, is_alone)
            remove_others(copies, decisions, beside, local, options, is_alone)
        prepared = [
            whole or _take_over(copy, is_locked, options, trusts)
            for copy, whole, is_locked in zip(copies, wholes, locks, strict=True)
        ]
        _reserve(local, prepared, unfinished, spared, options)
    note = keep_for_job(local, options.placement.job, os.environ)
    if note:
        stack.push(partial(_drop, note))
    return prepared


def _find_whole(
    copy: LocalCopy, decision: Decision, options: StageOptions, stack: ExitStack, trusts: bool, waits: bool
) -> Prepared | None:
    """Find out whether a copy is whole; None if it is not. One process of a node compares the checksums for all."""
    if not isinstance(decision, Keep):
        return None
    with ExitStack() as checking:
        is_locked = False
        if trusts and boot_id() and not copy.is_checked() and os.access(copy.target, os.W_OK):
            is_locked = checking.enter_context(_hold_target(copy, options, waits))
        present = copy.find_present(options.timeout_s, trusts, is_locked)
        content = copy.read_folder()
        if len(present) < copy.num_files or content.content != copy.content:
            return None
        copy.note_splits(content)
        stack.push(checking.pop_all())
    return Prepared(copy, present, is_locked, "")


def _hold_target(copy: LocalCopy, options: StageOptions, waits: bool) -> AbstractContextManager[bool]:
    with suppress(FileNotFoundError):  # it is removed at this moment
        watched.call(partial(warn_of_place, copy.source, copy.target), options.timeout_s, copy.source)
    return hold_lock(copy.target, options.timeout_s, waits)


def remove_others(
    copies: Sequence[LocalCopy],
    decisions: Sequence[Decision],
    beside: Sequence[FolderContent],
    local: Path,
    options: StageOptions,
    is_locked: bool,
) -> None:
    """Remove what makes way for copies: all of it, or nothing.

    Args:
        copies: Copies to be made.
        decisions: Decision that `check` has made for each.
        beside: Copies of other data sets, which `check` has found.
        local: Folder for the copies, which may be one of them.
        options: Settings of staging.
        is_locked: Whether this process has locked `local`.

    Raises:
        StagingError: One is in use, pinned, kept or another user's.
    """
    replaced = [(copy, its) for copy, its in zip(copies, decisions, strict=True) if isinstance(its, Replace)]
    with ExitStack() as stack:
        fds = claim_all(beside, [copy.read_folder() for copy, _ in replaced], local, options, is_locked, stack)
        for content, fd in zip(beside, fds, strict=True):
            spared = LOG if content.folder == local.resolve() else ""  # which this process may be writing
            if not remove_claimed(content, fd, "it is in the way of another data set", spared):
                raise StagingError("is in the way, and cannot be removed", path=content.folder)
        for copy, decision in replaced:
            logger.info("%s holds another version of the data set, or another data set: replacing it", copy.target)
            (copy.target / MANIFEST).unlink(missing_ok=True)  # first
            sync_folder(copy.target)
            for name in decision.names:
                (copy.target / name).unlink(missing_ok=True)


def _take_over(copy: LocalCopy, is_locked: bool, options: StageOptions, trusts: bool) -> Prepared:
    """Find out what is in place in a folder that is locked, unless it cannot be, and remove what is not the copy's."""
    present = copy.find_present(options.timeout_s, trusts, is_locked)
    content = copy.read_folder()
    decision = decide(content, copy, options, present)
    if isinstance(decision, Refuse):
        raise StagingError(decision.why, path=decision.path)
    if content.is_begun:
        sweep(copy, is_locked, present)
    if is_locked and not is_handmade(content, copy):
        remove_slots(copy)
    return Prepared(copy, present, is_locked, "" if is_locked else make_own_name())


def _reserve(
    local: Path,
    prepared: Sequence[Prepared],
    unfinished: Collection[LocalCopy],
    spared: Collection[Path],
    options: StageOptions,
) -> None:
    """Make room for what is missing, and say in each folder of what it will be a copy: it is kept free from then on."""
    begun = [its for its in prepared if its.copy in unfinished]
    contents = [its.copy.read_folder() for its in begun]
    needed = sum(_needed_bytes(its, content) for its, content in zip(begun, contents, strict=True))
    if not begun:
        return
    with reserved_room(needed, spared, local, options):
        for its, content in zip(begun, contents, strict=True):
            if not is_handmade(content, its.copy):
                its.copy.write_origin(its.present, False, options.in_background and its.is_locked)


def _needed_bytes(prepared: Prepared, content: FolderContent) -> int:
    """Return what the missing files still take on the disk."""
    files = [file for file in prepared.copy.manifest.all_files() if file.name not in prepared.present]
    begun = (content.allocated_bytes(temporary_path(Path(file.name), PARTIAL).name) for file in files)
    return sum(max(0, file.size_bytes - on_disk) for file, on_disk in zip(files, begun, strict=True))


def _drop(note: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Remove the note that keeps the copies for a job, if they cannot be staged: other jobs may need the room."""
    if kind is not None and issubclass(kind, Exception):
        note.unlink(missing_ok=True)


def remove_slots(copy: LocalCopy) -> None:
    """Remove slots for a part of a data set. Raises StagingError if a process uses them."""
    with hold_unused(copy.target / SLOTS):
        for name in (TAGS, SLOTS):
            (copy.target / name).unlink(missing_ok=True)


def sweep(copy: LocalCopy, is_locked: bool, present: Collection[str]) -> None:
    """Remove temporary files that no process will continue, from a folder that has an `.origin.json`.

    Args:
        copy: Copy of a data set.
        is_locked: Whether no other process is at work here. If that is not known, only files go whose process, as their
            names tell, was on this host and has ended.
        present: Names of the files that are in place.
    """
    files = [copy.target / file.name for file in copy.manifest.all_files() if file.name not in present]
    continued = {temporary_path(file, kind) for file in files for kind in KINDS}
    for path in {path for kind in KINDS for path in copy.target.glob(f".*.{kind}")} - continued:
        if is_locked or is_of_dead_process(path):
            path.unlink(missing_ok=True)
