"""Bring packed data sets to node-local disk."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..dataset.manifest import MANIFEST, read_content
from ..errors import DatapipeError, SettingError, StagingError
from ..streams import apart, in_time
from .copy import Staged, stage_copies
from .local_copy import LocalCopy, list_copies
from .options import StageOptions

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
        options: How to copy (default: StageOptions()).

    Returns:
        One result per data set.

    Raises:
        SettingError: `local` lies in `source` or is a file.
        ManifestError: There is no readable data set at `source`.
        StagingError: There is not enough space, `local` holds another data set, another process holds its lock and
            does nothing, or the source was changed meanwhile.
        ShardCorruptError: The source is damaged.
        DatapipeError: A read or write takes longer than `options.timeout_s`, or fails.
    """
    source, local, options = Path(source), Path(local), options or StageOptions()
    with _errors_name_the_node():
        if options.resolved_mode() == "exchange":
            from .together import stage_together

            return apart(lambda: stage_together(source, local, options))
        copies = in_time(lambda: list_copies(source, local), source, options.timeout_s)
        if options.mode == "slice":
            from .slice import stage_slice

            return stage_slice(source, local, copies, options)
        return stage_copies(source, local, copies, options)


def stage_once(source: Path, cache: Path, options: StageOptions | None = None) -> Path:
    """Stage one data set into a cache that all processes of a node share.

    Args:
        source: The data set.
        cache: A node-local folder: the data set's copy, the folder of its splits' copies, or a folder for copies of any
            data sets. There, a copy's folder is named after the manifest's content, so that another version of the data
            set never takes its place.
        options: How to copy (default: StageOptions()).

    Returns:
        The folder of the copy.

    Raises:
        DatapipeError, SettingError: As `stage`.
    """
    return stage_or_join(Path(source), Path(cache), options or StageOptions(), joins=False)[0]


def stage_or_join(source: Path, cache: Path, options: StageOptions, joins: bool) -> tuple[Path, bool]:
    """Do what `stage_once` does, unless a process is copying in the background.

    Args:
        source: the data set.
        cache: a node-local folder, see `stage_once`.
        options: how to copy.
        joins: whether a part is enough: not to wait for a process that is copying in the background, and not to refuse
            a folder that has room for a part only.

    Returns:
        The folder of the copy, and whether it is whole.
    """
    with _errors_name_the_node():
        content = in_time(lambda: read_content(source), source / MANIFEST, options.timeout_s)
        name = source.resolve().name
        folders = cache, cache / name, cache / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
        copies = [LocalCopy.of_content(source, folder, content) for folder in folders]
        copy = next((copy for copy in copies if copy.is_named()), copies[-1])
        if copy.has_slots() and not joins:
            raise SettingError(f"cache: {copy.target} has room for a part only; this needs the whole data set")
        if copy.has_slots() or (joins and copy.may_be_used()):
            return copy.target, False
        stage_copies(source, copy.target, [copy], options, trusts=True)
    return copy.target, True


@contextmanager
def _errors_name_the_node() -> Iterator[None]:
    """Add this node's name to errors: a job's log has those of many."""
    try:
        yield
    except DatapipeError as error:
        error.message += f" (on {socket.gethostname()})"
        raise
    except OSError as error:
        message = f"{error.strerror or error} (errno {error.errno}, on {socket.gethostname()})"
        raise StagingError(message, path=error.filename) from error
