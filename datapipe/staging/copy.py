"""Copy data sets by one process: what is in place, what is missing, and the threads that copy it."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..console import Progress
from ..dataset.manifest import INDEX
from ..streams import Moved, in_time, work_on_files
from .keep import EvictedError, hold_copy, keep_for_job
from .landing import Landing, make_own_name
from .local_copy import LocalCopy, States
from .lock import hold_lock
from .options import StageOptions
from .origin import ORIGIN
from .plan import Chunk, needed_bytes, stagger
from .source_files import SourceFile, Throttle
from .space import check_space, warn_of_place
from .taking_over import (
    check_handmade,
    check_slice,
    check_writable,
    is_handmade,
    remove_other,
    remove_slots,
    sweep,
    take_place,
)
from .transfer import Transfer, missing_chunks

logger = logging.getLogger(__name__)

ATTEMPTS = 100  # to hold a copy that another process removes whenever nobody holds it


@dataclass(frozen=True)
class Staged:
    """A data set's local copy.

    Attributes:
        folder: of the copy.
        num_samples: of the data set.
        copied_bytes: read from the source by this call.
        kept_bytes: of files that were there already.
        received_bytes: from other nodes.
    """

    folder: Path
    num_samples: int
    copied_bytes: int
    kept_bytes: int
    received_bytes: int = 0


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


def stage_copies(
    source: Path,
    local: Path,
    copies: list[LocalCopy],
    options: StageOptions,
    trusts: bool = False,
    holds: ExitStack | None = None,
) -> list[Staged]:
    """Copy data sets by this process alone.

    Args:
        source: the folder that they are in, for messages.
        local: the folder that their copies go to.
        copies: what to copy.
        options: how.
        trusts: whether files that were checked since the node booted, and not changed since, count as good.
        holds: lets the copies go, which nobody removes until then (default: they are not held).

    Returns:
        One result per data set.
    """
    for attempt in range(ATTEMPTS):
        with ExitStack() as mine, ExitStack() as stack:
            prepared = prepare(source, local, copies, options, stack, trusts=trusts)
            files = transfers(prepared, options, options.chunk_bytes)
            copied = copy_missing(files, source, local, options)
            try:
                for its in prepared:
                    its.complete(mine, options.timeout_s)
            except EvictedError as error:
                if attempt == ATTEMPTS - 1:
                    raise
                logger.info("%s: staging it again", error)
                continue
            if holds is not None:
                holds.enter_context(mine.pop_all())
            break
    return report(prepared, files, copied)


def prepare(
    source: Path,
    local: Path,
    copies: list[LocalCopy],
    options: StageOptions,
    stack: ExitStack,
    trusts: bool = False,
    waits: bool = True,
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

    Returns:
        what is known of each copy.

    Raises:
        BusyError: another process is staging, and `waits` is False.
        StagingError, SettingError: as `stage`.
    """
    if options.mode != "slice":  # which has done it, for all data sets
        take_place(source, local, copies, options)
    for copy in copies:
        copy.check_other(options.replace)
        if options.mode != "slice" and not options.replace:
            check_slice(copy)
    keep_for_job(local, options.placement.job, os.environ)
    prepared = []
    for copy in copies:
        present = copy.find_present(options.timeout_s, trusts, False) if copy.has_manifest() else {}
        is_locked, own_name = False, ""
        if len(present) < copy.num_files:
            with suppress(FileNotFoundError):  # it is removed at this moment
                in_time(partial(warn_of_place, copy.source, copy.target), copy.source, options.timeout_s)
            is_locked = stack.enter_context(hold_lock(copy.target, options.timeout_s, waits))
            if not is_locked:
                own_name = make_own_name()
            copy.check_other(options.replace)  # in the meantime, another process may have put something there
            is_theirs, was_begun = is_handmade(copy), (copy.target / ORIGIN).exists()
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
        prepared.append(Prepared(copy, present, is_locked, own_name))
    return prepared


def transfers(prepared: list[Prepared], options: StageOptions, chunk_bytes: int) -> list[Transfer]:
    """Return all files of some data sets, on their way.

    Args:
        prepared: copies of the data sets.
        options: how to copy.
        chunk_bytes: size of the chunks.
    """
    throttle = Throttle(options.max_mbps and options.max_mbps * 1e6)
    files = []
    for number, (copy, present, own_name) in enumerate((its.copy, its.present, its.own_name) for its in prepared):
        index_first = sorted(copy.manifest.all_files(), key=lambda info: info.name != INDEX)  # as a loader opens them
        for info in index_first:
            source = SourceFile(copy.source / info.name, info, throttle, options.retries)
            landing = Landing(copy.target / info.name, info, chunk_bytes, info.name in present, own_name)
            if options.in_background and not landing.is_whole:
                landing.open()  # so that a loader may add to it before its turn comes
                landing.close()
            files.append(Transfer(number, source, landing))
    return files


def copy_missing(files: list[Transfer], source: Path, local: Path, options: StageOptions) -> list[int]:
    """Copy what is missing of some files.

    Args:
        files: on their way.
        source: the folder that they are in, for messages.
        local: where they go to.
        options: how to copy.

    Returns:
        The bytes that were read from the source, by file.
    """
    chunks = missing_chunks(files)
    check_space(needed_bytes(chunks), files, local, options)

    def copy(chunk: Chunk, moved: Moved) -> list[tuple[int, int]]:
        counts = []
        for extent in chunk:
            moved(files[extent.file].source.path)
            counts.append((extent.file, files[extent.file].copy(extent, moved)))
        return counts

    copied = [0] * len(files)
    chunks = stagger(chunks, options.placement.rank, options.placement.world_size, options.num_streams)
    results = work_on_files(
        copy, chunks, lambda chunk: files[chunk[0].file].source.path, options.timeout_s, options.num_streams
    )
    with closing(results), Progress(f"staging {source}", needed_bytes(chunks), "B") as progress:
        for counts in results:
            for file, num_bytes in counts:
                copied[file] += num_bytes
                progress.advance(num_bytes)
    return copied


def report(
    prepared: list[Prepared], files: list[Transfer], copied: list[int], lacked: list[int] | None = None
) -> list[Staged]:
    """Sum up by data set.

    Args:
        prepared: copies of the data sets.
        files: of all data sets.
        copied: by file, the bytes that were read from the source.
        lacked: by file, the bytes that were missing; None: other nodes have sent nothing.

    Returns:
        One result per data set.
    """
    sums, received = [0] * len(prepared), [0] * len(prepared)
    for file, num_bytes, its_lacked in zip(files, copied, lacked or copied, strict=True):
        sums[file.number] += num_bytes
        received[file.number] += max(0, its_lacked - num_bytes)
    return [
        Staged(
            its.copy.target,
            its.copy.manifest.num_samples,
            sums[number],
            its.copy.bytes_of(its.present),
            received[number],
        )
        for number, its in enumerate(prepared)
    ]
