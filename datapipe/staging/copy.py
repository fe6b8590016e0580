"""Copy data sets by one process: what is in place, what is missing, and the threads that copy it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from .. import watched
from ..console import Progress
from ..dataset.block_slots import SLOTS, count_held, make_slots
from ..dataset.index import open_index
from ..dataset.manifest import INDEX, MANIFEST, read_content
from ..dataset.shard_files import room_for
from ..errors import DatapipeError, OtherNodeError, SettingError, StagingError
from ..foreign import check_folder
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..locks import find_holder, hold_lock
from ..sampling.block_order import grid, longest
from ..watched import Moved, work_on_files
from .apply import prepare, remove_others, remove_slots, sweep
from .cache import remove
from .check import check, make_first_room, reserved_room, warn_of_place
from .decide import is_earlier
from .folder_content import find_copies
from .lease import EvictedError, keep_for_job
from .local_copy import LocalCopy
from .options import Request, StageOptions
from .partial_file import PartialFile
from .plan import Chunk, needed_bytes, stagger
from .transfer import SourceFile, Throttle, Transfer, missing_chunks

logger = logging.getLogger(__name__)

_ATTEMPTS = 100  # to hold a copy that another process removes whenever nobody holds it


@dataclass(frozen=True)
class Staged:
    """A data set's local copy.

    Attributes:
        folder: Folder of the copy.
        num_samples: Samples of the data set.
        copied_bytes: Bytes that this call has read from the source.
        kept_bytes: Size of the files that were there already.
        received_bytes: Bytes from other nodes.
    """

    folder: Path
    num_samples: int
    copied_bytes: int
    kept_bytes: int
    received_bytes: int = 0


def stage_copies(request: Request, holds: ExitStack | None = None) -> list[Staged]:
    """Copy data sets by this process alone, and return one result per data set.

    Args:
        request: Data sets, and the folder for their copies.
        holds: Stack that lets the copies go, which no process removes until then (default: they are not held).
    """
    options = request.options
    for attempt in range(_ATTEMPTS):
        with ExitStack() as mine, ExitStack() as stack:
            prepared = prepare(request, stack)
            files = transfers(prepared, options, options.chunk_bytes)
            copy_missing(files, request)
            try:
                for copy in prepared:
                    copy.complete(mine, options.timeout_s)
            except EvictedError as error:
                if attempt == _ATTEMPTS - 1:
                    raise
                logger.info("%s: staging it again", error)
                continue
            if holds is not None:
                holds.enter_context(mine.pop_all())
            break
    return report(prepared, files)


def transfers(prepared: Sequence[LocalCopy], options: StageOptions, chunk_bytes: int) -> list[Transfer]:
    """Return all files of some data sets, on their way.

    Args:
        prepared: Copies of the data sets.
        options: Settings of staging.
        chunk_bytes: Size of the chunks.
    """
    throttle = Throttle(options.max_mbps and options.max_mbps * 1e6)
    is_shared = options.resolved_mode() == "exchange"
    files = []
    for number, copy in enumerate(prepared):
        index_first = sorted(copy.manifest.all_files(), key=lambda info: info.name != INDEX)  # as a loader opens them
        for info in index_first:
            source = SourceFile(copy.source / info.name, info, throttle, options.retries, is_shared)
            is_whole = info.name in copy.present
            landing = PartialFile(copy.target / info.name, info, chunk_bytes, is_whole, copy.own_name)
            if options.in_background and not landing.is_whole:
                landing.open()  # so that a loader may add to it before its turn comes
                landing.close()
            files.append(Transfer(number, source, landing))
    return files


def copy_missing(files: list[Transfer], request: Request) -> None:
    """Copy what is missing of some files of a request's data sets."""
    options, place = request.options, request.options.placement

    def copy(chunk: Chunk, moved: Moved) -> list[tuple[Transfer, int]]:
        counts = []
        for extent in chunk:
            file = files[extent.file]
            moved(file.source.path)
            counts.append((file, file.copy(extent, moved)))
        return counts

    chunks = stagger(missing_chunks(files), place.rank, place.world_size, options.num_streams)
    results = work_on_files(
        copy, chunks, lambda chunk: files[chunk[0].file].source.path, options.timeout_s, options.num_streams
    )
    with closing(results), Progress(f"staging {request.source}", needed_bytes(chunks), "B") as progress:
        for file, num_bytes in chain.from_iterable(results):
            file.copied_bytes += num_bytes
            progress.advance(num_bytes)


def report(prepared: Sequence[LocalCopy], files: list[Transfer], lacked: list[int] | None = None) -> list[Staged]:
    """Sum up by data set.

    Args:
        prepared: Copies of the data sets.
        files: Files of all data sets.
        lacked: Bytes that were missing, by file; None if other nodes have sent nothing.

    Returns:
        One result per data set.
    """
    copied, received = [0] * len(prepared), [0] * len(prepared)
    for file, missing in zip(files, lacked or [0] * len(files), strict=True):
        copied[file.number] += file.copied_bytes
        received[file.number] += max(0, missing - file.copied_bytes)
    return [
        Staged(copy.target, copy.manifest.num_samples, copied[number], copy.present_bytes, received[number])
        for number, copy in enumerate(prepared)
    ]


def open_cache(
    source: Path, cache: Path, options: StageOptions, holds: ExitStack | None, accepts_part: bool
) -> tuple[Path, bool]:
    """Stage a data set to a cache as `stage_once` does, or use what of it is there.

    Args:
        source: The data set.
        cache: A node-local folder, see `stage_once`.
        options: Settings of staging.
        holds: Stack that lets the copy go, which no process removes until then.
        accepts_part: Whether a copy may be used that is still arriving in the background, or a folder that has room for
            a part only.

    Returns:
        The folder of the copy, and whether it is whole.
    """
    with errors_name_the_node():
        content = watched.call(lambda: read_content(source), options.timeout_s, source / MANIFEST)
        copies = [LocalCopy.of_content(source, cache, content)]
        name = source.resolve().name
        copies += [replace(copies[0], target=cache / target) for target in (name, f"{name}-{copies[0].digest}")]
        there = ((copy, copy.read_folder()) for copy in copies)
        copy, folder = next(((copy, its) for copy, its in there if its.digest == copy.digest), (copies[-1], None))
        check_folder(copy.target)  # a part is not checked as a whole: only the samples' short checksums are compared
        origin = folder and folder.origin
        if folder and origin and origin.capacity_bytes and not folder.is_whole:
            raise StagingError(
                "its room for a part is not ready: stage to it again, with --mode slice", path=copy.target
            )
        if origin and origin.capacity_bytes and not accepts_part:
            raise SettingError(f"cache: {copy.target} has room for a part only; this needs the whole data set")
        is_arriving = accepts_part and origin and origin.in_background and find_holder(copy.target)
        if origin and (origin.capacity_bytes or is_arriving):
            copy.touch()
            return copy.target, False
        make_folder(cache.parent, PRIVATE_MODE)
        make_folder(cache, OWN_MODE)
        is_own = copy.target.parent == cache
        options = replace(options, evict=is_own)
        request = Request(source, copy.target, [copy], options, trusts=True, checks_beside=False)
        (staged,) = stage_copies(request, holds)
        if staged.copied_bytes and is_own:
            _remove_earlier(copy)
    return copy.target, True


def _remove_earlier(copy: LocalCopy) -> None:
    """Remove the copies of earlier versions of a data set, beside that of its present version, that may be removed."""
    for other in find_copies(copy.target.parent):
        if is_earlier(other, copy.resolved, copy.identity) and other.digest != copy.digest:
            remove(other, f"{copy.target.name} is of a later version")


# --- room for a part of a data set, which loaders fill with what they need soonest ---


def stage_slice(request: Request) -> list[Staged]:
    """Copy what fits into the capacity, the smallest data sets first; the largest gets slots in what is left.

    A chunk has the size of a block. Return one result per data set.

    Raises:
        SettingError: The capacity is less than a block, or a smaller data set does not fit. And what `stage` raises.
    """
    options, local = request.options, request.local
    assert options.capacity_bytes is not None
    check(request)
    *smaller, largest = sorted(request.copies, key=lambda copy: copy.manifest.size_bytes)
    left = options.capacity_bytes - sum(copy.manifest.size_bytes for copy in smaller)
    if left >= largest.manifest.size_bytes:
        return stage_copies(request)
    if left <= 0:
        names = ", ".join(copy.source.name for copy in smaller)
        raise SettingError(f"capacity: {options.capacity_bytes:,} bytes are too few for all of {names}")
    request = replace(request, part=largest)
    check(request)
    slots = watched.call(lambda: _plan_slots(largest, left, options.chunk_bytes), options.timeout_s, largest.source)
    make_first_room(request)
    make_folder(local.parent, PRIVATE_MODE)
    with ExitStack() as stack:
        is_alone = False
        if smaller:  # stagers of other data sets wait; else their target is locked
            is_alone = stack.enter_context(hold_lock(local, options.timeout_s))
        decisions, beside = check(request, is_alone)
        remove_others(request, decisions, beside, is_alone)
        rest = replace(request, copies=smaller, checks_beside=False, part=None)
        results = stage_copies(rest) if smaller else []
        results.append(watched.call(lambda: _make_slots(largest, request, slots), options.timeout_s, largest.source))
        keep_for_job(local, options.placement.job, os.environ)
        return results


def _plan_slots(copy: LocalCopy, capacity_bytes: int, block_bytes: int) -> tuple[int, int, int]:
    """Return the number of blocks of a data set, and the number and size of slots for them."""
    index = open_index(copy.source, copy.manifest)
    blocks = grid(index, block_bytes)
    num_blocks, slot_bytes = len(blocks.starts) - 1, room_for(longest(index, blocks))
    num_slots = min(capacity_bytes // slot_bytes, num_blocks)
    if not num_slots:
        raise SettingError(f"capacity: {capacity_bytes:,} bytes have no room for a block of {slot_bytes:,}")
    return num_blocks, num_slots, slot_bytes


def _make_slots(copy: LocalCopy, request: Request, slots: tuple[int, int, int]) -> Staged:
    (num_blocks, num_slots, slot_bytes), options = slots, request.options
    warn_of_place(copy.source, copy.target)
    with hold_lock(copy.target, options.timeout_s):
        check(Request(copy.source, copy.target, [copy], options, checks_beside=False, part=copy))
        content, needed = copy.read_folder(), num_slots * slot_bytes
        sizes = num_slots, slot_bytes, options.chunk_bytes
        kept_bytes = count_held(copy.target, sizes) if content.digest == copy.digest else None
        if kept_bytes is None:
            old_bytes = content.allocated_bytes(SLOTS)  # which are free when the slots are made again
            with reserved_room(request, needed - old_bytes):
                if content.origin:
                    sweep(replace(copy, is_locked=True), ())
                remove_slots(copy)
                copy.write_origin(False, capacity_bytes=needed)
                make_slots(copy.target, *sizes)
        copy.note_splits(content)
        if kept_bytes is None or not (content.origin and content.origin.is_complete):
            copy.write_origin(True, capacity_bytes=needed)
    part = f"{num_slots:,} of {num_blocks:,} blocks ({num_slots / num_blocks:.0%})"
    logger.info("%s: room for %s, which loaders with order='blocks' fill", copy.target, part)
    return Staged(copy.target, copy.manifest.num_samples, 0, kept_bytes or 0)


@contextmanager
def errors_name_the_node() -> Iterator[None]:
    """Add this node's name to errors that name no other: a job's log has those of many."""
    try:
        yield
    except OtherNodeError:
        raise
    except DatapipeError as error:
        error.message += f" (on {socket.gethostname()})"
        raise
    except OSError as error:
        message = f"{error.strerror or error} (errno {error.errno}, on {socket.gethostname()})"
        raise StagingError(message, path=error.filename) from error
