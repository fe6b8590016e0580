"""Bring packed data sets to node-local disk."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from .. import watched
from ..dataset.manifest import MANIFEST, read_content
from ..errors import SettingError, StagingError
from ..foreign import check_folder
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..locks import find_holder
from .cache import remove
from .copy import Staged, errors_name_the_node, stage_copies, stage_slice
from .decide import is_earlier
from .folder_content import find_copies
from .local_copy import LocalCopy
from .options import Request, StageOptions

__all__ = ["StageOptions", "Staged", "stage", "stage_once"]


def stage(source: Path, local: Path, options: StageOptions | None = None) -> list[Staged]:
    """Copy the data set at `source`, or each of its splits, to `local`.

    A file that is there already is kept if it has the manifest's checksum, and copied again if not. What an interrupted
    call left is continued: at most one chunk per stream is copied twice. Every file is read back and checked before it
    gets its name. A second process waits for the first, and then copies nothing. Where everything is in place, nothing
    is locked or written, so `local` may be read-only.

    Args:
        source: A data set, or the folder of its splits.
        local: The folder for the copy; splits become its sub-folders.
        options: Settings of staging (default: StageOptions()).

    Returns:
        One result per data set.

    Raises:
        SettingError: `local` lies in `source` or is a file.
        ManifestError: There is no readable data set at `source`.
        StagingError: There is not enough space, `local` holds another data set, another process holds its lock and
            does nothing, or the source was changed meanwhile.
        ShardCorruptError: The source is damaged, or cannot be read.
        DatapipeError: A read or write takes longer than `options.timeout_s`, or fails.
    """
    source, local, options = Path(source), Path(local), options or StageOptions()
    with errors_name_the_node():
        if options.resolved_mode() == "exchange":
            from .multi_node import stage_together

            return stage_together(source, local, options)
        request = Request.read(source, local, options)
        return stage_slice(request) if options.mode == "slice" else stage_copies(request)


def stage_once(source: Path, cache: Path, options: StageOptions | None = None, holds: ExitStack | None = None) -> Path:
    """Stage one data set into a cache that all processes of a node share.

    To make room, copies in the cache that nobody uses are removed, least recently used first; copies of earlier
    versions of the data set always are.

    Args:
        source: The data set.
        cache: A node-local folder: the data set's copy, the folder of its splits' copies, or a folder for copies of any
            data sets. There, a copy's folder is named after the manifest's content, so that another version of the data
            set never takes its place.
        options: Settings of staging (default: StageOptions()).
        holds: Nobody removes the copy until this is closed, or the process ends (default: anybody may at once).

    Returns:
        The folder of the copy.

    Raises:
        DatapipeError, SettingError: As `stage`.
    """
    return open_cache(Path(source), Path(cache), options or StageOptions(), holds, accepts_part=False)[0]


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
