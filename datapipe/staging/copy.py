"""Copy data sets by one process: what is in place, what is missing, and the threads that copy it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from ..console import Progress
from ..errors import SettingError, StagingError
from ..fsio import free_bytes, make_folder
from ..streams import Moved, work_on_files
from .landing import Landing, make_own_name
from .local_copy import LocalCopy
from .lock import hold_lock
from .options import StageOptions
from .plan import Chunk, cut, needed_bytes, stagger
from .source_files import SourceFile, Throttle
from .transfer import Transfer


@dataclass(frozen=True)
class Staged:
    """A data set's local copy.

    Attributes:
        folder: of the copy.
        num_samples: of the data set.
        copied_bytes: read from the source by this call.
        kept_bytes: of files that were there already.
    """

    folder: Path
    num_samples: int
    copied_bytes: int
    kept_bytes: int


def stage_copies(
    source: Path, local: Path, copies: list[LocalCopy], options: StageOptions, trusts: bool = False
) -> list[Staged]:
    """Copy data sets by this process alone.

    Args:
        source: the folder that they are in, for messages.
        local: the folder that their copies go to.
        copies: what to copy.
        options: how.
        trusts: whether files that were checked since the node booted, and not changed since, count as good.

    Returns:
        One result per data set.
    """
    with ExitStack() as stack:
        present, own_name = take(source, local, copies, options, trusts, stack)
        files = transfers(copies, present, own_name, options, options.chunk_bytes)
        copied = copy_missing(files, source, local, options)
        for copy in copies:
            copy.complete()
    return report(copies, present, files, copied)


def take(
    source: Path, local: Path, copies: list[LocalCopy], options: StageOptions, trusts: bool, stack: ExitStack
) -> tuple[list[set[str]], str]:
    """Find out what is in place, and lock the folders of copies that are not whole.

    Args:
        source: the folder that the data sets are in.
        local: the folder that the copies go to.
        copies: of the data sets.
        options: how to copy.
        trusts: whether files that were checked since the node booted, and not changed since, count as good.
        stack: unlocks the folders.

    Returns:
        by data set, the names of the files that are in place; and what makes temporary names this process's own.
    """
    if local.resolve().is_relative_to(source.resolve()):
        raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
    if local.exists() and not local.is_dir():
        raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")
    present, own_name = [], ""
    for copy in copies:
        copy.check_other(options.replace)
        names = copy.find_present(options.timeout_s, trusts) if copy.has_manifest() else set()
        if len(names) < copy.num_files:
            make_folder(copy.target)
            is_locked = stack.enter_context(hold_lock(copy.target, options.timeout_s))
            if not is_locked:
                own_name = make_own_name()
            copy.check_other(options.replace)  # in the meantime, another process may have put something there
            copy.remove_other()
            copy.sweep(is_locked)
            names = copy.find_present(options.timeout_s, trusts)
        present.append(names)
    return present, own_name


def transfers(
    copies: list[LocalCopy], present: list[set[str]], own_name: str, options: StageOptions, chunk_bytes: int
) -> list[Transfer]:
    """Return all files of some data sets, on their way.

    Args:
        copies: of the data sets.
        present: by data set, the names of the files that are in place.
        own_name: of `take`.
        options: how to copy.
        chunk_bytes: size of the chunks.
    """
    throttle = Throttle(options.max_mbps and options.max_mbps * 1e6)
    return [
        Transfer(
            number,
            SourceFile(copy.source / info.name, info, throttle, options.retries),
            Landing(copy.target / info.name, info, chunk_bytes, info.name in present[number], own_name),
        )
        for number, copy in enumerate(copies)
        for info in copy.manifest.all_files()
    ]


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
    check_space(local, needed_bytes(chunks))

    def copy(chunk: Chunk, moved: Moved) -> list[tuple[int, int]]:
        counts = []
        for extent in chunk:
            moved(files[extent.file].source.path)
            counts.append((extent.file, files[extent.file].copy(extent, moved)))
        return counts

    copied = [0] * len(files)
    chunks = stagger(chunks, options.placement.rank, options.placement.world_size, options.streams)
    results = work_on_files(
        copy, chunks, lambda chunk: files[chunk[0].file].source.path, options.timeout_s, options.streams
    )
    with closing(results), Progress(f"staging {source}", needed_bytes(chunks), "B") as progress:
        for counts in results:
            for file, num_bytes in counts:
                copied[file] += num_bytes
                progress.advance(num_bytes)
    return copied


def missing_chunks(files: list[Transfer]) -> list[Chunk]:
    """List the chunks of some files that have not landed; of small files, only those that are missing."""
    sizes, chunk_bytes = [file.source.info.size_bytes for file in files], files[0].landing.chunk_bytes
    chunks = (tuple(e for e in chunk if files[e.file].lacks(e)) for chunk in cut(sizes, chunk_bytes))
    return [chunk for chunk in chunks if chunk]


def check_space(local: Path, needed: int) -> None:
    """Raise StagingError where `needed` bytes do not fit."""
    if needed and needed > (free := free_bytes(local)):
        raise StagingError(f"needs {needed:,} bytes, {free:,} are free", path=local)


def report(copies: list[LocalCopy], present: list[set[str]], files: list[Transfer], copied: list[int]) -> list[Staged]:
    """Sum up by data set.

    Args:
        copies: of the data sets.
        present: by data set, the names of the files that were in place.
        files: of all data sets.
        copied: by file, the bytes that were read from the source.

    Returns:
        One result per data set.
    """
    sums = [0] * len(copies)
    for file, num_bytes in zip(files, copied, strict=True):
        sums[file.number] += num_bytes
    return [
        Staged(copy.target, copy.manifest.num_samples, sums[number], copy.bytes_of(present[number]))
        for number, copy in enumerate(copies)
    ]
