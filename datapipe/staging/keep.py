"""What protects a copy from being removed when room is needed.

Whoever uses a copy holds a shared lock (flock) on its manifest: users who may only read it can, too, and the kernel
releases it when a process ends, in whatever way. Between two steps of a job no process is alive, and for good there is
nobody to hold a lock, so two files do the same, in the copy's folder or above it in the cache:

    LOCAL/.keep-JOB.json   keeps the copies in LOCAL for a job: until when, and in which life of which node
    LOCAL/.pinned          keeps them until it is removed
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import clock
from ..cluster import job_end
from ..dataset.manifest import MANIFEST
from ..errors import StagingError, WrongPathError
from ..foreign import READ, find_problem, read_own, user_name
from ..fsio import OWN_MODE, atomic_write, boot_id, lock_holder, make_folder
from .lock import BusyError
from .origin import ORIGIN

logger = logging.getLogger(__name__)

PINNED, KEEP = ".pinned", re.compile(r"\.keep-.+\.json")
KEEP_S = 24 * 3600.0  # how long a copy is kept for a job of which nobody tells when it ends
LOOK_S = 0.05  # between looks at a lock that another process holds


class EvictedError(StagingError):
    """A copy was removed meanwhile, to make room: it has to be staged again."""


class HeldCopy:
    """A copy that is in use: nobody removes it until this is closed, or the process ends. See `hold_copy`.

    Attributes:
        folder: of the copy.
    """

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder, self._fd = folder, fd

    def close(self) -> None:
        """Let the copy go. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> HeldCopy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def hold_copy(folder: Path, patience_s: float) -> HeldCopy:
    """Hold a copy, so that nobody removes it. On a filesystem without locks, nobody does anyway.

    Args:
        folder: of the copy.
        patience_s: how long to wait for a process that has its manifest for itself, in seconds.

    Returns:
        What is to be closed when the copy is not used any more.

    Raises:
        EvictedError: it was removed meanwhile.
        BusyError: another process has its manifest for itself, and does not end.
    """
    path, deadline = folder / MANIFEST, clock.now() + patience_s
    while True:
        try:
            copy = HeldCopy(folder, fd := os.open(path, READ))
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                return copy
        except FileNotFoundError as error:
            raise EvictedError("was removed meanwhile, to make room", path=folder) from error
        except BlockingIOError as error:  # who removes it holds it for a moment
            if clock.now() > deadline:
                holder = lock_holder(path) or "another process"
                raise BusyError(f"{holder} has had it for itself for {patience_s:g} s", path=path) from error
            time.sleep(LOOK_S)
        except OSError as error:
            if error.filename is not None:  # it cannot be opened
                raise
            return copy  # it cannot be locked


@dataclass(frozen=True)
class Keep:
    """A note that copies are kept for a job.

    Attributes:
        path: of the note.
        job: its number, as the scheduler gives it.
        host: the node.
        boot: what tells the node's present life from others.
        pid: of the process that has written it, for people.
        until: when the job ends, in seconds since 1970.
    """

    path: Path
    job: str
    host: str
    boot: str
    pid: int
    until: float

    @classmethod
    def read(cls, path: Path) -> Keep | None:
        """Read a note; None where it cannot be read, or neither root nor the folder's owner has written it."""
        try:
            fields = json.loads(read_own(path, os.stat(path.parent).st_uid))
            job, host, boot = (str(fields[name]) for name in ("job", "host", "boot"))
            return cls(path, job, host, boot, int(fields["pid"]), float(fields["until"]))
        except StagingError as error:
            _warn_once(str(error))
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def is_valid(self) -> bool:
        """Return whether the job may still run: its time is not over, nor has this node booted since."""
        is_of_this_boot = self.boot == boot_id() or self.host != socket.gethostname()
        return is_of_this_boot and time.time() < self.until


def keep_for_job(local: Path, job: str, environ: Mapping[str, str]) -> None:
    """Keep the copies in a folder until the job ends; not where the folder is another user's.

    Args:
        local: the folder; it is made if it is not there.
        job: number of the job; "": in none, and nothing is kept.
        environ: the environment variables, which may tell when the job ends.
    """
    if not job:
        return
    end = job_end(environ, time.time()) or time.time() + KEEP_S
    fields = {"job": job, "host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "until": end}
    for _ in range(100):
        with suppress(FileNotFoundError):  # another process removes the empty folder at this moment
            make_folder(local, OWN_MODE)
            try:
                if os.stat(local).st_uid == os.geteuid():
                    _remove_ended(local)
                    with atomic_write(local / f".keep-{quote(job)}.json", alone=False, is_own=True) as file:
                        file.write(json.dumps(fields).encode())
            except FileNotFoundError:
                raise
            except OSError as error:
                logger.warning("%s cannot be kept for job %s: %s", local, job, error.strerror)
            return


def _remove_ended(local: Path) -> None:
    """Remove the notes of jobs whose time is over, or that ran before the node booted: no epilog has done it."""
    for keep in keeps_in(local):
        if not keep.is_valid():
            keep.path.unlink(missing_ok=True)


def quote(job: str) -> str:
    """Return a job's number as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", job)[:100]


def keeps_in(folder: Path) -> Iterator[Keep]:
    """Iterate over the notes in a folder that keep its copies for jobs, also for those that have ended."""
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if KEEP.fullmatch(name) and (keep := Keep.read(folder / name)):
                yield keep


def pin(local: Path) -> None:
    """Keep the copies in a folder until they are unpinned. Raises StagingError where there is none of this user's."""
    _check_own(local)
    if not any(local.glob(ORIGIN)) and not any(local.glob(f"*/{ORIGIN}")):
        raise StagingError("is not a copy, and holds none", path=local)
    with atomic_write(local / PINNED, alone=False, is_own=True):
        pass


def unpin(local: Path) -> None:
    """Undo `pin`. Raises StagingError for another user's folder, and for one that is not pinned itself."""
    _check_own(local)
    try:
        (local / PINNED).unlink()
    except FileNotFoundError as error:
        raise StagingError("is not pinned", path=local) from error


def is_pinned(folder: Path) -> bool:
    """Return whether a folder has been pinned, by its owner or by root."""
    with suppress(OSError):
        problem = find_problem(os.lstat(folder / PINNED), os.stat(folder).st_uid)
        if problem:
            _warn_once(f"{folder / PINNED}: {problem}, so it is not believed: remove it")
        return not problem
    return False


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _check_own(local: Path) -> None:
    if not local.is_dir():
        raise WrongPathError("is not a folder", path=local)
    if (owner := local.stat().st_uid) != os.geteuid():
        raise StagingError(f"is user {user_name(owner)}'s: only that user can pin or unpin it", path=local)
