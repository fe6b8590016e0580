"""Checkpoints on a node's own disk, from which they are copied to the run's folder while training continues."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datapipe import clock
from datapipe.errors import SettingError, StagingError
from datapipe.foreign import check_file, check_folder, open_regular
from datapipe.fsio import PRIVATE_MODE, atomic_write, make_folder, named

from ..reporting.runlog import NAME as METRICS
from .file import BEST, CHECKPOINT, keep_as, move_earlier, save_checkpoint

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20


def local_folder(root: Path, run: Path) -> Path | None:
    """Return the folder below `root` for the checkpoints of a run; None where the run has not begun.

    Its name comes from the run's path and the first line of its metrics, which tells when it began: another run in the
    same folder has another name.

    Args:
        root: Folder on this node's own disk.
        run: Folder of the run.

    Raises:
        SettingError: `root` lies in `run`; or other users could have put a checkpoint there, or could change one.
    """
    if root.resolve().is_relative_to(run.resolve()):
        raise SettingError(f"--local-checkpoints {root}: lies in --out; use a folder on the node's own disk")
    with _naming_option(root):
        check_folder(root)
    try:
        with open(run / METRICS, "rb", opener=open_regular) as file:
            first_line = file.readline()
    except FileNotFoundError:
        return None
    digest = hashlib.blake2b(first_line + os.fsencode(run.resolve()), digest_size=8)
    folder = root / f"trainer-{digest.hexdigest()}"
    with _naming_option(root):
        check_folder(folder)
        for name in (CHECKPOINT, BEST):
            check_file(folder / name)
    return folder


@contextmanager
def _naming_option(root: Path) -> Iterator[None]:
    """Raise SettingError in place of StagingError."""
    try:
        yield
    except StagingError as error:
        raise SettingError(f"--local-checkpoints {root}: {error}") from error


@contextmanager
def open_local(root: Path, run: Path, keep: int, checkpoint: dict[str, Any] | None) -> Iterator[LocalCheckpoints]:
    """Open the checkpoints below a folder of a run that has begun.

    What an earlier attempt has left there is copied to the run if that continues from it, and otherwise removed.

    Args:
        root: Folder on this node's own disk.
        run: Folder of the run.
        keep: Number of the last checkpoints that are kept in the run's folder.
        checkpoint: Result of `read_checkpoint`, from which the run continues.

    Yields:
        The checkpoints; in the end their copies are waited for.

    Raises:
        SettingError: As `local_folder`.
    """
    folder = local_folder(root, run)
    assert folder is not None
    if checkpoint is None or Path(checkpoint["path"]).parent != folder:
        shutil.rmtree(folder, ignore_errors=True)
    local = LocalCheckpoints(folder, run, keep)
    try:
        yield local
    finally:
        local.close()


class LocalCheckpoints:
    """The last checkpoint of a run and its best one on this node's own disk, and a thread that copies them to the run.

    Only the newest ones are copied: where checkpoints come faster than they can be copied, some never are.

    Args:
        folder: Folder on the node's own disk; for this run alone.
        run: Folder of the run.
        keep: Number of the last checkpoints that are kept in the run's folder.
    """

    def __init__(self, folder: Path, run: Path, keep: int) -> None:
        self.folder, self._run, self._keep = folder, run, keep
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # names of files that are to be copied
        self._failed: set[str] = set()  # of those whose last copy failed
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self.longest_copy_s = 0.0  # of a checkpoint, and with it the best one
        self._begin_copying({name for name in (CHECKPOINT, BEST) if (folder / name).exists()})  # of an earlier attempt

    def save(self, content: dict[str, Any], is_best: bool) -> bool:
        """Write a checkpoint to this disk, and begin to copy it.

        Args:
            content: Content of the checkpoint, as for `save_checkpoint`.
            is_best: Whether it is that of the best epoch.

        Returns:
            Whether it is on this disk. If not, nothing is being copied any more.
        """
        try:
            make_folder(self.folder, PRIVATE_MODE)
            check_folder(self.folder)  # in a folder such as /tmp, another user may have made it first
            save_checkpoint(self.folder / CHECKPOINT, content)
            if is_best:
                keep_as(self.folder / CHECKPOINT, self.folder / BEST)
        except (OSError, StagingError) as error:
            logger.warning("no checkpoint on this node's disk: %s; it is written to %s at once", error, self._run)
            self._wait()
            return False
        self._begin_copying({CHECKPOINT, BEST} if is_best else {CHECKPOINT})
        return True

    def _begin_copying(self, names: set[str]) -> None:
        with self._lock:
            self._waiting |= names | self._failed
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._copy_waiting, name="trainer-checkpoints", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise the OSError of the last copy, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until the run's folder has what this disk has. Raises OSError."""
        self._wait()
        self.check()

    def discard(self) -> None:
        """Remove this run's checkpoints from this disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Wait as `finish` does, and log an error instead of raising it."""
        try:
            self.finish()
        except OSError as error:
            logger.error("%s; the newest checkpoint is in %s", error, self.folder)

    def _wait(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _copy_waiting(self) -> None:
        while True:
            with self._lock:
                names, self._waiting = self._waiting, set()
                if not names:
                    self._thread = None
                    return
            began = clock.now()
            try:
                self._copy(names)
                error = None
            except Exception as failure:  # whatever it is, the run has no newer checkpoint
                error = failure if isinstance(failure, OSError) else OSError(f"{type(failure).__name__}: {failure}")
            self.longest_copy_s = max(self.longest_copy_s, clock.now() - began)
            with self._lock:
                self._error, self._failed = error, names if error else set()

    def _copy(self, names: set[str]) -> None:
        copied = None
        for name in sorted(names, reverse=True):  # the last before the best, which is often the same file
            path = self._run / name
            with named(self.folder / name), open(self.folder / name, "rb") as source:
                file_number = os.fstat(source.fileno()).st_ino
                if file_number == copied:
                    keep_as(self._run / CHECKPOINT, path)
                    continue
                with atomic_write(path) as file:
                    shutil.copyfileobj(source, file, _COPY_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                    if name == CHECKPOINT:
                        move_earlier(path, self._keep)
                        copied = file_number
