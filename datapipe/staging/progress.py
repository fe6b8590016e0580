"""How far a copy is, as its folder tells without a look at the source; and staging in the background."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import clock
from ..dataset.block_slots import SLOTS, BlockSlots
from ..dataset.manifest import MANIFEST
from ..dataset.partial_reader import LANDED, count_landed
from ..errors import StagingError
from ..foreign import open_own, read_note
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..locks import find_holder
from ..watched import TIMEOUT_S
from .folder_content import LOG, ORIGIN, FolderContent, subfolders

logger = logging.getLogger(__name__)

LOOK_S = 0.2
SAY_S = 10.0  # how often to say how far it is


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

    def as_row(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

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
    folders = [path.parent for path in (local / ORIGIN, *sorted(local.glob(f"*/{ORIGIN}"))) if path.exists()]
    if not folders:
        raise StagingError("nothing was staged there", path=local)
    try:
        holder = next(filter(None, map(find_holder, folders)), "")
    except FileNotFoundError as error:
        raise StagingError("was removed to make room", path=local) from error
    # After that: a process completes them before it leaves.
    copies = [FolderContent.read(folder, folder, follows=True) for folder in folders]
    origins = [copy.origin for copy in copies if copy.origin]
    if len(origins) < len(copies):
        copy = next(copy for copy in copies if not copy.origin)
        if not copy.info:
            raise StagingError("was removed to make room", path=copy.folder)
        raise StagingError("cannot be read, or another user could have written it", path=copy.folder / ORIGIN)
    counts = [_count(copy, {*origin.files}) for copy, origin in zip(copies, origins, strict=True)]
    landed, whole = zip(*counts, strict=True)
    is_slice = any(origin.capacity_bytes for origin in origins)
    is_whole = all(map(_is_whole, copies, landed))
    if local not in folders:  # one of several splits may have been removed, or is not staging's
        splits = {name for origin in origins for name in origin.splits} - {folder.name for folder in folders}
        is_whole &= all((local / name / MANIFEST).exists() for name in splits)
    state, seconds_left = ("slice" if is_slice else "whole") if is_whole else "running" if holder else "stopped", None
    if state == "running":
        passed = time.time() - min(origin.began for origin in origins)
        came = sum(landed) - sum(origin.began_bytes for origin in origins)
        total = sum(origin.total_bytes for origin in origins)
        seconds_left = passed * (total - sum(landed)) / came if came > 0 and passed > 0 else None
    return StageProgress(
        state, sum(landed), sum(origin.total_bytes for origin in origins), sum(whole), seconds_left, holder
    )


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
    landed = whole = 0
    if SLOTS in copy.entries:
        with suppress(StagingError):
            slots = BlockSlots(copy.folder)
            landed = slots.held_bytes()
            slots.close()
    for name, info in copy.entries.items():
        with suppress(OSError, ValueError):
            if name.endswith(f".{LANDED}") and name.startswith("."):
                landed += count_landed(read_note(copy.folder / name))
            elif name.startswith(".") or name == MANIFEST or (names and name not in names):
                continue
            elif stat.S_ISREG(info.st_mode):
                landed, whole = landed + info.st_size, whole + 1
    return landed, whole


def wait_until_whole(local: Path, timeout_s: float = TIMEOUT_S) -> StageProgress:
    """Wait until another process has staged to a folder, and say how far it is every 10 s.

    Args:
        local: Folder of a copy, or of the copies of several splits.
        timeout_s: Longest time without a change there, in seconds.

    Returns:
        The progress at the end: all is there.

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
        if now - said > SAY_S:
            said = now
            logger.info("%s: %s", local, progress)
        time.sleep(LOOK_S)
    if progress.state == "stopped":
        raise StagingError(f"{progress}: no process is at work there{_last_words(local)}", path=local)
    return progress


def continue_in_background(local: Path) -> Background | None:
    """Make a process that continues in the background, apart from this one's terminal.

    Args:
        local: Folder that it stages to. What it says is written there, to `.stage.log`.

    Returns:
        To this process the other one; to that one, or where there can be none, None: it is to stage.
    """
    before = _count_landed(local)
    try:
        make_folder(local.parent, PRIVATE_MODE)
        make_folder(local, OWN_MODE)
        log = open_own(local / LOG, os.O_APPEND)
    except (OSError, StagingError) as error:
        if not isinstance(error, StagingError) and error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        logger.warning("%s cannot be written (%s): staging in the foreground", local / LOG, error)
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(log)
        return Background(local, child, before)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The log is emptied, unless another process still writes to it. Where files cannot be locked, it only grows.
    with suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(log, 0)
    with suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what a script has open would stay open
    return None


@dataclass
class Background:
    """A process that stages in the background, a child of this one.

    Attributes:
        local: Folder that it stages to.
        pid: Its number.
        before: Bytes that were there before, as far as they stay.
    """

    local: Path
    pid: int
    before: int

    def wait_for_first(self) -> StageProgress:
        """Wait until the process has brought something, or is done. An interrupt ends it, too.

        Raises:
            StagingError: It has failed; says why.
        """
        try:
            while True:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.pid = 0
                    if status:
                        message = f"staging in the background has failed{_last_words(self.local)}"
                        raise StagingError(message, path=self.local)
                    return _describe_end(self.local)
                with suppress(StagingError):
                    progress = find_progress(self.local)
                    if progress.state == "running" and progress.landed_bytes > self.before:
                        return progress
                    self.before = min(self.before, progress.landed_bytes)  # an earlier version's files are removed
                time.sleep(LOOK_S)
        except BaseException:
            if self.pid:
                os.kill(self.pid, signal.SIGTERM)
            raise


def _splits(local: Path) -> list[Path]:
    return [path.parent for path in local.glob(f"*/{ORIGIN}")]


def _describe_end(local: Path) -> StageProgress:
    """Describe what was staged to its end; also where somebody else had put it there."""
    with suppress(StagingError):
        return find_progress(local)
    copies = [FolderContent.read(folder, folder, follows=True) for folder in (local, *subfolders(local))]
    landed, whole = (sum(counts) for counts in zip(*map(_count, copies), strict=True))
    return StageProgress("whole", landed, landed, whole, None)


def _count_landed(local: Path) -> int:
    with suppress(StagingError):
        return find_progress(local).landed_bytes
    return 0


def _last_words(local: Path) -> str:
    with suppress(OSError):
        lines = read_note(local / LOG).decode(errors="replace").strip().splitlines()
        if lines:
            return f" ({local / LOG}: {lines[-1].removeprefix('error: ')})"
    return ""
