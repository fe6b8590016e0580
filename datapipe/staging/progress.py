"""How far a copy is, as its folder tells without a look at the source; and waiting for a process that stages."""

from __future__ import annotations

import logging
import os
import signal
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import clock
from ..dataset.block_slots import SLOTS, count_held
from ..dataset.manifest import MANIFEST
from ..dataset.partial_reader import LANDED, count_landed
from ..errors import StagingError
from ..foreign import read_note
from ..fsio import list_folders
from ..locks import find_holder
from ..watched import TIMEOUT_S
from .folder_content import LOG, ORIGIN, FolderContent

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_SAY_S = 10.0  # how often to say how far it is


@dataclass(frozen=True)
class StageProgress:
    """How far staging to a folder is.

    Attributes:
        state: "whole"; "running", a process is at work; "stopped", none is, and files are missing; "slice", there is
            room for a part, which loaders fill.
        landed_bytes: Bytes that are in LOCAL.
        total_bytes: Size of all its data sets.
        whole_files: Number of files that are in LOCAL with their final names.
        seconds_left: Time that the rest takes at the speed until now; None if that is not known.
        holder: Process that is at work, if it is known.
    """

    state: str
    landed_bytes: int
    total_bytes: int
    whole_files: int
    seconds_left: float | None
    holder: str = ""

    def __str__(self) -> str:
        share = f"{self.landed_bytes / 2**20:,.1f} of {self.total_bytes / 2**20:,.1f} MiB"
        if self.state != "running":
            return f"{self.state}, {share}"
        left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
        return f"running, {share}{left}" + (f" ({self.holder})" if self.holder else "")


def find_progress(local: Path) -> StageProgress:
    """Look how far staging to a folder is.

    Args:
        local: Folder of a copy, or of the copies of several splits.

    Raises:
        StagingError: Nothing was staged there, or what was cannot be read, or is removed at this moment.
    """
    folders = [folder for folder in (local, *_splits(local)) if (folder / ORIGIN).exists()]
    if not folders:
        raise StagingError("nothing was staged there", path=local)
    holder = next(filter(None, map(find_holder, folders)), "")
    # After that: a process completes them before it leaves.
    copies = [FolderContent.read(folder, folder, follows=True) for folder in folders]
    for copy in copies:
        if not copy.info:
            raise StagingError("was removed to make room", path=copy.folder)
        if not copy.origin:
            raise StagingError("cannot be read, or another user could have written it", path=copy.folder / ORIGIN)
    origins = [copy.origin for copy in copies if copy.origin]
    counts = [_count(copy, {*origin.files}) for copy, origin in zip(copies, origins, strict=True)]
    landed, whole = zip(*counts, strict=True)
    landed_bytes, total_bytes = sum(landed), sum(origin.total_bytes for origin in origins)
    is_whole = all(map(_is_whole, copies, landed))
    if local not in folders:  # one of several splits may have been removed, or is not staging's
        splits = {name for origin in origins for name in origin.splits} - {folder.name for folder in folders}
        is_whole &= all((local / name / MANIFEST).exists() for name in splits)
    is_slice = any(origin.capacity_bytes for origin in origins)
    state, seconds_left = ("slice" if is_slice else "whole") if is_whole else "running" if holder else "stopped", None
    if state == "running":
        passed = time.time() - min(origin.began for origin in origins)
        came = landed_bytes - sum(origin.began_bytes for origin in origins)
        seconds_left = passed * (total_bytes - landed_bytes) / came if came > 0 and passed > 0 else None
    return StageProgress(state, landed_bytes, total_bytes, sum(whole), seconds_left, holder)


def look(local: Path) -> StageProgress | None:
    """Do what `find_progress` does; None where it raises."""
    with suppress(StagingError):  # there is nothing yet
        return find_progress(local)
    return None


def _is_whole(copy: FolderContent, landed: int) -> bool:
    origin = copy.origin
    return (
        origin is not None
        and origin.is_complete
        and (
            origin.capacity_bytes > 0
            or (MANIFEST in copy.entries and (landed >= origin.total_bytes or not origin.files))
        )
    )


def _count(copy: FolderContent, names: Collection[str] = ()) -> tuple[int, int]:
    """Return the bytes that are in a folder, and the number of whole files; of all, unless `names` gives some."""
    landed, whole = count_held(copy.folder) or 0 if SLOTS in copy.entries else 0, 0
    for name, info in copy.entries.items():
        with suppress(OSError, ValueError):  # it is removed at this moment, or is something else
            if name.endswith(f".{LANDED}") and name.startswith("."):
                landed += count_landed(read_note(copy.folder / name))
            elif name.startswith(".") or name == MANIFEST or (names and name not in names):
                continue
            elif stat.S_ISREG(info.st_mode):
                landed, whole = landed + info.st_size, whole + 1
    return landed, whole


def wait_until_whole(local: Path, timeout_s: float = TIMEOUT_S) -> StageProgress:
    """Wait until another process has staged to a folder, and say how far it is every 10 s; return the progress then.

    Args:
        local: Folder of a copy, or of the copies of several splits.
        timeout_s: Longest time without a change there, in seconds.

    Raises:
        StagingError: No process stages there, or it does nothing.
    """
    said = changed = clock.now()
    state: object = None
    while (progress := find_progress(local)).state == "running":
        now = clock.now()
        if state != (state := [progress.landed_bytes, [path.stat().st_mtime_ns for path in (local, *_splits(local))]]):
            changed = now
        if now - changed > timeout_s:
            message = f"{progress}: nothing has changed for {timeout_s:g} s (timeout_s); end that process"
            raise StagingError(message, path=local)
        if now - said > _SAY_S:
            said = now
            logger.info("%s: %s", local, progress)
        time.sleep(_LOOK_S)
    if progress.state == "stopped":
        raise StagingError(f"{progress}: no process is at work there{_last_words(local)}", path=local)
    return progress


def wait_for_first(local: Path, pid: int, before: int) -> StageProgress:
    """Wait until a child of this process that stages has brought something, or is done. An interrupt ends it, too.

    Args:
        local: Folder that it stages to.
        pid: Number of the child.
        before: Bytes that were there before it began.

    Returns:
        The progress.

    Raises:
        StagingError: It has failed; says why.
    """
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pid = 0
                if status:
                    raise StagingError(f"staging in the background has failed{_last_words(local)}", path=local)
                return look(local) or _describe_end(local)
            if progress := look(local):
                if progress.state == "running" and progress.landed_bytes > before:
                    return progress
                before = min(before, progress.landed_bytes)  # an earlier version's files are removed
            time.sleep(_LOOK_S)
    except BaseException:
        if pid:
            os.kill(pid, signal.SIGTERM)
        raise


def _splits(local: Path) -> list[Path]:
    return sorted(path.parent for path in local.glob(f"*/{ORIGIN}"))


def _describe_end(local: Path) -> StageProgress:
    """Describe what was staged to its end where staging has left no note, since it was all there."""
    copies = [FolderContent.read(folder, folder, follows=True) for folder in (local, *list_folders(local))]
    landed, whole = (sum(counts) for counts in zip(*map(_count, copies), strict=True))
    return StageProgress("whole", landed, landed, whole, None)


def _last_words(local: Path) -> str:
    with suppress(OSError):  # it has written none
        lines = read_note(local / LOG).decode(errors="replace").strip().splitlines()
        if lines:
            return f" ({local / LOG}: {lines[-1].removeprefix('error: ')})"
    return ""
