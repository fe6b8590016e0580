"""Bring packed data sets to node-local disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from .copy import Staged, errors_name_the_node, open_cache, stage_copies, stage_slice
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
