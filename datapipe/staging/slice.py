"""Make room on a node's own disk for a part of a data set, which loaders fill with what they need soonest."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from .. import watched
from ..dataset.block_slots import SLOTS, BlockSlots, make_slots
from ..dataset.index import open_index
from ..dataset.shard_files import room_for
from ..errors import SettingError, StagingError
from ..fsio import PRIVATE_MODE, make_folder
from ..locks import hold_lock
from ..sampling.block_order import grid, longest
from .apply import remove_others, remove_slots, sweep
from .cache import make_first_room, reserved_room
from .check import check, warn_of_place
from .copy import Staged, stage_copies
from .folder_content import FolderContent
from .lease import keep_for_job
from .local_copy import LocalCopy
from .options import StageOptions

logger = logging.getLogger(__name__)


def stage_slice(source: Path, local: Path, copies: list[LocalCopy], options: StageOptions) -> list[Staged]:
    """Copy what fits into the capacity, the smallest data sets first; the largest gets slots in what is left.

    Args:
        source: Folder that contains them, for messages.
        local: Folder for their copies.
        copies: Copies of the data sets.
        options: Settings of staging, with `capacity_bytes`; a chunk has the size of a block.

    Returns:
        One result per data set.

    Raises:
        SettingError: The capacity is less than a block, or a smaller data set does not fit.
        DatapipeError, OSError: What `stage` raises.
    """
    assert options.capacity_bytes is not None
    check(source, local, copies, options)
    *smaller, largest = sorted(copies, key=lambda copy: copy.manifest.size_bytes)
    left = options.capacity_bytes - sum(copy.manifest.size_bytes for copy in smaller)
    if left >= largest.manifest.size_bytes:
        return stage_copies(source, local, copies, options)
    if left <= 0:
        names = ", ".join(copy.source.name for copy in smaller)
        raise SettingError(f"capacity: {options.capacity_bytes:,} bytes are too few for all of {names}")

    def is_part(copy: LocalCopy) -> bool:
        return copy is largest

    check(source, local, copies, options, is_part=is_part)
    room = watched.call(lambda: _plan_room(largest, left, options), options.timeout_s, largest.source)
    make_first_room({path for copy in copies for path in (copy.source, copy.target)}, local, options)
    make_folder(local.parent, PRIVATE_MODE)
    with ExitStack() as stack:
        is_alone = False
        if smaller:  # stagers of other data sets wait; else their target is locked
            is_alone = stack.enter_context(hold_lock(local, options.timeout_s))
        decisions, beside = check(source, local, copies, options, is_locked=is_alone, is_part=is_part)
        remove_others(copies, decisions, beside, local, options, is_alone)
        results = stage_copies(source, local, smaller, options, checks_beside=False) if smaller else []
        results.append(
            watched.call(lambda: _make_room(largest, local, room, options), options.timeout_s, largest.source)
        )
        keep_for_job(local, options.placement.job, os.environ)
        return results


class _Room(NamedTuple):
    num_blocks: int
    num_slots: int
    slot_bytes: int


def _plan_room(copy: LocalCopy, capacity_bytes: int, options: StageOptions) -> _Room:
    index = open_index(copy.source, copy.manifest)
    blocks = grid(index, options.chunk_bytes)
    num_blocks, slot_bytes = len(blocks.starts) - 1, room_for(longest(index, blocks))
    num_slots = min(capacity_bytes // slot_bytes, num_blocks)
    if not num_slots:
        raise SettingError(f"capacity: {capacity_bytes:,} bytes have no room for a block of {slot_bytes:,}")
    return _Room(num_blocks, num_slots, slot_bytes)


def _make_room(copy: LocalCopy, local: Path, room: _Room, options: StageOptions) -> Staged:
    num_blocks, num_slots, slot_bytes = room
    warn_of_place(copy.source, copy.target)
    with hold_lock(copy.target, options.timeout_s):
        check(copy.source, copy.target, [copy], options, checks_beside=False, is_part=lambda _: True)
        content, needed = copy.read_folder(), num_slots * slot_bytes
        kept_bytes = _find_kept_bytes(content, copy, (num_slots, slot_bytes, options.chunk_bytes))
        if kept_bytes is None:
            old_bytes = content.allocated_bytes(SLOTS)  # which are free when the slots are made again
            with reserved_room(needed - old_bytes, {copy.source, copy.target}, local, options):
                if content.origin:
                    sweep(copy, True, {file.name for file in copy.manifest.all_files()})
                remove_slots(copy)
                copy.write_origin((), False, capacity_bytes=needed)
                make_slots(copy.target, num_slots, slot_bytes, options.chunk_bytes)
        copy.note_splits(content)
        if kept_bytes is None or not (content.origin and content.origin.is_complete):
            copy.write_origin((), True, capacity_bytes=needed)
    part = f"{num_slots:,} of {num_blocks:,} blocks ({num_slots / num_blocks:.0%})"
    logger.info("%s: room for %s, which loaders with order='blocks' fill", copy.target, part)
    return Staged(copy.target, copy.manifest.num_samples, 0, kept_bytes or 0)


def _find_kept_bytes(content: FolderContent, copy: LocalCopy, sizes: tuple[int, int, int]) -> int | None:
    """Return the bytes of blocks in a folder's slots; None if it has no such slots for this data set."""
    if content.digest != copy.digest:
        return None
    try:
        slots = BlockSlots(copy.target)
    except StagingError:
        return None
    kept = slots.held_bytes() if (slots.num_slots, slots.slot_bytes, slots.block_bytes) == sizes else None
    slots.close()
    return kept
