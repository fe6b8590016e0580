"""Copy data sets by one process: what is in place, what is missing, and the threads that copy it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .. import watched
from ..console import Progress
from ..dataset.manifest import INDEX, MANIFEST, read_content
from ..errors import DatapipeError, OtherNodeError, SettingError, StagingError
from ..foreign import check_folder
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..locks import find_holder
from ..watched import Moved, work_on_files
from .apply import Prepared, prepare
from .cache import remove_earlier
from .lease import EvictedError
from .local_copy import LocalCopy
from .options import StageOptions
from .partial_file import PartialFile
from .plan import Chunk, needed_bytes, stagger
from .transfer import SourceFile, Throttle, Transfer, missing_chunks

logger = logging.getLogger(__name__)

ATTEMPTS = 100  # to hold a copy that another process removes whenever nobody holds it


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
        source: Folder that contains them, for messages.
        local: Folder for their copies.
        copies: Copies to make.
        options: Settings of staging.
        trusts: Whether files that were checked since the node booted, and not changed since, count as good.
        holds: Stack that lets the copies go, which no process removes until then (default: they are not held).
        checks_beside: Whether no other data sets may be in the folder.

    Returns:
        One result per data set.
    """
    for attempt in range(ATTEMPTS):
        with ExitStack() as mine, ExitStack() as stack:
            prepared = prepare(source, local, copies, options, stack, trusts, checks_beside=checks_beside)
            files = transfers(prepared, options, options.chunk_bytes)
            copied = copy_missing(files, source, options)
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
        prepared: Copies of the data sets.
        options: Settings of staging.
        chunk_bytes: Size of the chunks.
    """
    throttle = Throttle(options.max_mbps and options.max_mbps * 1e6)
    is_shared = options.resolved_mode() == "exchange"
    files = []
    for number, (copy, present, own_name) in enumerate((its.copy, its.present, its.own_name) for its in prepared):
        index_first = sorted(copy.manifest.all_files(), key=lambda info: info.name != INDEX)  # as a loader opens them
        for info in index_first:
            source = SourceFile(copy.source / info.name, info, throttle, options.retries, is_shared)
            landing = PartialFile(copy.target / info.name, info, chunk_bytes, info.name in present, own_name)
            if options.in_background and not landing.is_whole:
                landing.open()  # so that a loader may add to it before its turn comes
                landing.close()
            files.append(Transfer(number, source, landing))
    return files


def copy_missing(files: list[Transfer], source: Path, options: StageOptions) -> list[int]:
    """Copy what is missing of some files.

    Args:
        files: Files on their way.
        source: Folder that contains them, for messages.
        options: Settings of staging.

    Returns:
        The bytes that were read from the source, by file.
    """
    chunks = missing_chunks(files)

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
        prepared: Copies of the data sets.
        files: Files of all data sets.
        copied: Bytes that were read from the source, by file.
        lacked: Bytes that were missing, by file; None if other nodes have sent nothing.

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
        if folder and folder.origin and folder.origin.capacity_bytes:
            if not folder.is_whole:
                message = "its room for a part is not ready: stage to it again, with --mode slice"
                raise StagingError(message, path=copy.target)
            if not accepts_part:
                raise SettingError(f"cache: {copy.target} has room for a part only; this needs the whole data set")
            copy.touch()
            return copy.target, False
        if accepts_part and folder and folder.origin and folder.origin.in_background and _is_held(copy.target):
            copy.touch()
            return copy.target, False
        make_folder(cache.parent, PRIVATE_MODE)
        make_folder(cache, OWN_MODE)
        is_own = copy.target.parent == cache
        options = replace(options, evict=is_own)
        (staged,) = stage_copies(source, copy.target, [copy], options, trusts=True, holds=holds, checks_beside=False)
        if staged.copied_bytes and is_own:
            remove_earlier(copy)
    return copy.target, True


def _is_held(folder: Path) -> bool:
    """Return whether a process is at work on a copy."""
    with suppress(FileNotFoundError):
        return bool(find_holder(folder))
    return False


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
