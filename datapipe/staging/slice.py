"""Make room on a node's own disk for a part of a data set, which loaders fill with what they need soonest."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from ..dataset.block_slots import SLOTS, BlockSlots, make_slots
from ..dataset.index import open_index
from ..dataset.manifest import MANIFEST
from ..dataset.shard_files import room_for
from ..errors import SettingError, StagingError
from ..fsio import PRIVATE_MODE, make_folder
from ..sampling.block_order import grid, longest
from ..streams import in_time
from .copy import Staged, stage_copies
from .keep import keep_for_job
from .local_copy import LocalCopy
from .lock import hold_lock
from .options import StageOptions
from .origin import ORIGIN, Origin
from .prepare import check
from .space import make_space, warn_of_place
from .taking_over import names_there, remove_beside, remove_slots, sweep

logger = logging.getLogger(__name__)


def stage_slice(source: Path, local: Path, copies: list[LocalCopy], options: StageOptions) -> list[Staged]:
    """Copy what fits into the capacity, the smallest data sets first; the largest gets slots in what is left.

    Args:
        source: the folder that they are in, for messages.
        local: the folder that their copies go to.
        copies: of the data sets.
        options: `capacity_bytes` and how to copy; a chunk has the size of a block.

    Returns:
        One result per data set.

    Raises:
        SettingError: the capacity is less than a block, or a smaller data set does not fit.
        DatapipeError, OSError: as `stage`.
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
    _check_folder(largest, options)
    room = in_time(lambda: _plan_room(largest, left, options), largest.source, options.timeout_s)
    make_folder(local.parent, PRIVATE_MODE)
    with ExitStack() as stack:
        is_alone = False
        if smaller:  # stagers of other data sets wait; else their target is locked
            is_alone = stack.enter_context(hold_lock(local, options.timeout_s))
        remove_beside(check(source, local, copies, options, is_locked=is_alone), is_alone)
        results = stage_copies(source, local, smaller, options, checks_beside=False) if smaller else []
        keep_for_job(local, options.placement.job, os.environ)
        return [*results, in_time(lambda: _make_room(largest, room, options), largest.source, options.timeout_s)]


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


def _make_room(copy: LocalCopy, room: _Room, options: StageOptions) -> Staged:
    num_blocks, num_slots, slot_bytes = room
    warn_of_place(copy.source, copy.target)
    with hold_lock(copy.target, options.timeout_s):
        _check_folder(copy, options)
        kept_bytes = _find_kept_bytes(copy, (num_slots, slot_bytes, options.chunk_bytes))
        if kept_bytes is None:
            needed = num_slots * slot_bytes
            make_space(needed - _old_bytes(copy.target), {copy.source, copy.target}, copy.target, options)
            if (copy.target / ORIGIN).exists():
                sweep(copy, True, {file.name for file in copy.manifest.all_files()})
            remove_slots(copy)
            copy.write_origin((), False, capacity_bytes=needed)
            make_slots(copy.target, num_slots, slot_bytes, options.chunk_bytes)
        copy.note_splits()
        if kept_bytes is None or not Origin.read(copy.target).is_complete:
            copy.write_origin((), True, capacity_bytes=num_slots * slot_bytes)
    part = f"{num_slots:,} of {num_blocks:,} blocks ({num_slots / num_blocks:.0%})"
    logger.info("%s: room for %s, which loaders with order='blocks' fill", copy.target, part)
    return Staged(copy.target, copy.manifest.num_samples, 0, kept_bytes or 0)


def _check_folder(copy: LocalCopy, options: StageOptions) -> None:
    """Raise StagingError where a folder holds files of a data set, which would be removed together with the slots."""
    copy.check_other(options.replace)
    names = names_there(copy)
    large = {MANIFEST, *(shard.name for shard in copy.manifest.shards)}
    if names and (large.intersection(names) or not copy.is_of_same_source()):
        raise StagingError(f"holds files of a copy, such as {names[0]}; choose another folder", path=copy.target)


def _old_bytes(folder: Path) -> int:
    """Return what a folder's slots take on the disk, which is free when they are made again."""
    with suppress(OSError):
        return os.lstat(folder / SLOTS).st_blocks * 512
    return 0


def _find_kept_bytes(copy: LocalCopy, sizes: tuple[int, int, int]) -> int | None:
    """Return the bytes of blocks in a folder's slots; None where it has no such slots for this data set."""
    if not copy.is_named():
        return None
    try:
        slots = BlockSlots(copy.target)
    except StagingError:
        return None
    kept = slots.held_bytes() if (slots.num_slots, slots.slot_bytes, slots.block_bytes) == sizes else None
    slots.close()
    return kept
