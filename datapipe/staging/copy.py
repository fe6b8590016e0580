"""Copy data sets by one process: what is in place, what is missing, and the threads that copy it."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from ..console import Progress
from ..dataset.manifest import INDEX
from ..streams import Moved, work_on_files
from .keep import EvictedError
from .landing import Landing
from .local_copy import LocalCopy
from .options import StageOptions
from .plan import Chunk, needed_bytes, stagger
from .prepare import Prepared, prepare
from .source_files import SourceFile, Throttle
from .space import check_space
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


def stage_copies(
    source: Path,
    local: Path,
    copies: list[LocalCopy],
    options: StageOptions,
    trusts: bool = False,
    holds: ExitStack | None = None,
    checks_beside: bool = True,
) -> list[Staged]:
    """Copy data sets by this process alone.

    Args:
        source: the folder that they are in, for messages.
        local: the folder that their copies go to.
        copies: what to copy.
        options: how.
        trusts: whether files that were checked since the node booted, and not changed since, count as good.
        holds: lets the copies go, which nobody removes until then (default: they are not held).
        checks_beside: whether no other data sets may be in the folder.

    Returns:
        One result per data set.
    """
    for attempt in range(ATTEMPTS):
        with ExitStack() as mine, ExitStack() as stack:
            prepared = prepare(source, local, copies, options, stack, trusts, checks_beside=checks_beside)
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
