"""Make folders ready for the copies of some data sets: what lies there is read and decided on, locked, and done."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import watched
from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST, FileInfo
from ..dataset.partial_reader import KINDS, PARTIAL, temporary_path
from ..errors import StagingError
from ..fsio import PRIVATE_MODE, boot_id, make_folder, sync_folder
from ..locks import hold_lock, hold_unused
from ..process_id import is_of_dead_process, make_own_name
from .cache import remove_claimed
from .check import check, claim_all, make_first_room, raise_refusal, reserved_room, warn_of_place
from .decide import Decision, Keep, Replace, decide, is_handmade
from .folder_content import LOG, FolderContent
from .lease import keep_for_job
from .local_copy import LocalCopy
from .options import Request

logger = logging.getLogger(__name__)


def prepare(request: Request, stack: ExitStack) -> list[LocalCopy]:
    """Find out what is in place; lock the folders of copies that are not whole, and make room for them.

    Args:
        request: Data sets, and the folder for their copies.
        stack: Stack that unlocks the folders. If an error ends it, the copies are no longer kept for the job.

    Returns:
        The copies, with what is known of each.

    Raises:
        BusyError: Another process is staging, and this one does not wait. And what `stage` raises.
    """
    copies, local, options = request.copies, request.local, request.options
    decisions, beside = check(request)
    make_first_room(request)
    make_folder(local.parent, PRIVATE_MODE)
    wholes = [
        isinstance(decision, Keep) and _find_whole(copy, request, stack)
        for copy, decision in zip(copies, decisions, strict=True)
    ]
    locks = [
        not whole and stack.enter_context(_hold_target(copy, request))
        for copy, whole in zip(copies, wholes, strict=True)
    ]
    with ExitStack() as moment:
        if beside or not all(wholes):
            is_alone = False
            if request.checks_beside and local not in [copy.target for copy in copies]:
                is_alone = moment.enter_context(hold_lock(local, options.timeout_s, request.waits))
            decisions, beside = check(request, is_alone)  # other processes may have come first
            remove_others(request, decisions, beside, is_alone)
        prepared = [
            whole or _take_over(replace(copy, is_locked=is_locked), request)
            for copy, whole, is_locked in zip(copies, wholes, locks, strict=True)
        ]
        _reserve(request, [copy for copy, whole in zip(prepared, wholes, strict=True) if not whole])
    note = keep_for_job(local, options.placement.job, os.environ)
    if note:
        stack.push(partial(_drop, note))
    return prepared


def _find_whole(copy: LocalCopy, request: Request, stack: ExitStack) -> LocalCopy | None:
    """Find out whether a copy is whole; None if it is not. One process of a node compares the checksums for all."""
    with ExitStack() as checking:
        is_locked = False
        if request.trusts and boot_id() and not copy.is_checked() and os.access(copy.target, os.W_OK):
            is_locked = checking.enter_context(_hold_target(copy, request))
        copy = replace(copy, is_locked=is_locked)
        present, content = copy.find_present(request.options.timeout_s, request.trusts), copy.read_folder()
        if len(present) < copy.num_files or content.content != copy.content:
            return None
        copy.note_splits(content)
        stack.push(checking.pop_all())
    return replace(copy, present=present)


def _hold_target(copy: LocalCopy, request: Request) -> AbstractContextManager[bool]:
    with suppress(FileNotFoundError):  # it is removed at this moment
        watched.call(partial(warn_of_place, copy.source, copy.target), request.options.timeout_s, copy.source)
    return hold_lock(copy.target, request.options.timeout_s, request.waits)


def remove_others(
    request: Request, decisions: Sequence[Decision], beside: Sequence[FolderContent], is_locked: bool
) -> None:
    """Remove what makes way for copies: all of it, or nothing.

    Args:
        request: Data sets, and the folder for their copies.
        decisions: Decision that `check` has made for each copy.
        beside: Copies of other data sets, which `check` has found.
        is_locked: Whether this process has locked the request's folder.

    Raises:
        StagingError: One is in use, pinned, kept or another user's.
    """
    pairs = zip(request.copies, decisions, strict=True)
    replaced = [(copy, decision.names) for copy, decision in pairs if isinstance(decision, Replace)]
    with ExitStack() as stack:
        fds = claim_all(request, beside, [copy.read_folder() for copy, _ in replaced], is_locked, stack)
        for content, fd in zip(beside, fds, strict=True):
            spared = LOG if content.folder == request.local.resolve() else ""  # which this process may be writing
            if not remove_claimed(content, fd, "it is in the way of another data set", spared):
                raise StagingError("is in the way, and cannot be removed", path=content.folder)
        for copy, names in replaced:
            logger.info("%s holds another version of the data set, or another data set: replacing it", copy.target)
            (copy.target / MANIFEST).unlink(missing_ok=True)  # first
            sync_folder(copy.target)
            for name in names:
                (copy.target / name).unlink(missing_ok=True)


def _take_over(copy: LocalCopy, request: Request) -> LocalCopy:
    """Find out what is in place in a folder that is locked, unless it cannot be, and remove what is not the copy's."""
    present, content = copy.find_present(request.options.timeout_s, request.trusts), copy.read_folder()
    raise_refusal(decide(content, copy, request.options, present))
    copy = replace(copy, present=present, own_name="" if copy.is_locked else make_own_name())
    if content.is_begun:
        sweep(copy, copy.missing)
    if copy.is_locked and not is_handmade(content, copy):
        remove_slots(copy)
    return copy


def _reserve(request: Request, begun: Sequence[LocalCopy]) -> None:
    """Make room for what is missing, and say in each folder of what it will be a copy: it is kept free from then on."""
    if not begun:
        return
    contents = [copy.read_folder() for copy in begun]
    needed = sum(_needed_bytes(copy, content) for copy, content in zip(begun, contents, strict=True))
    with reserved_room(request, needed):
        for copy, content in zip(begun, contents, strict=True):
            if not is_handmade(content, copy):
                copy.write_origin(False, request.options.in_background and copy.is_locked)


def _needed_bytes(copy: LocalCopy, content: FolderContent) -> int:
    """Return what the missing files still take on the disk."""
    begun = (content.allocated_bytes(temporary_path(Path(file.name), PARTIAL).name) for file in copy.missing)
    return sum(max(0, file.size_bytes - on_disk) for file, on_disk in zip(copy.missing, begun, strict=True))


def _drop(note: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Remove the note that keeps the copies for a job, if they cannot be staged: other jobs may need the room."""
    if kind is not None and issubclass(kind, Exception):
        note.unlink(missing_ok=True)


def remove_slots(copy: LocalCopy) -> None:
    """Remove slots for a part of a data set. Raises StagingError if a process uses them."""
    with hold_unused(copy.target / SLOTS):
        for name in (TAGS, SLOTS):
            (copy.target / name).unlink(missing_ok=True)


def sweep(copy: LocalCopy, continued: Collection[FileInfo]) -> None:
    """Remove temporary files that no process will continue, from a folder that has an `.origin.json`.

    Those of `continued` files stay. If the copy is not locked, other processes may be at work there: then only files go
    whose process, as their names tell, was on this host and has ended.
    """
    stay = {temporary_path(copy.target / file.name, kind) for file in continued for kind in KINDS}
    for path in {path for kind in KINDS for path in copy.target.glob(f".*.{kind}")} - stay:
        if copy.is_locked or is_of_dead_process(path):
            path.unlink(missing_ok=True)
