"""What protects a copy from being removed or replaced: a process that uses it, a job that needs it, a pin.

A process that uses a copy holds a shared lock (flock) on its manifest: users who may only read it can, too, and the
kernel releases it when the process ends, in whatever way. A lock lasts no longer than its process. Two files protect a
copy between the steps of a job, and for good. They lie in the copy's folder, or above it in the cache:

    LOCAL/.keep-JOB.json   keeps the copies in LOCAL for a job: until when, and which process says so
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
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import clock
from ..cluster import job_end
from ..dataset.manifest import MANIFEST
from ..errors import StagingError
from ..foreign import READ, find_problem, read_own
from ..fsio import (
    NETWORK_FILESYSTEMS,
    OWN_MODE,
    UNKNOWN,
    Descriptor,
    atomic_write,
    boot_id,
    list_entries,
    make_folder,
    mounted_as,
)
from ..locks import UNSEEN, BusyError, lock_holder
from ..process_id import ProcessId

logger = logging.getLogger(__name__)

PINNED, LEASE = ".pinned", re.compile(r"\.keep-.+\.json")
_KEEP_S = 24 * 3600.0  # for which a copy is kept, if the scheduler does not tell when its job ends
_LOOK_S = 0.05  # between looks at a lock that another process holds


class EvictedError(StagingError):
    """A copy was removed to make room, and has to be staged again."""


def hold_copy(folder: Path, patience_s: float) -> Descriptor:
    """Hold a copy, so that no process removes it. On a filesystem without locks, none does anyway.

    Args:
        folder: Folder of the copy.
        patience_s: Longest time to wait for a process that has its manifest for itself, in seconds.

    Returns:
        Descriptor to close when the copy is not used any more.

    Raises:
        EvictedError: It was removed.
        BusyError: Another process has its manifest for itself, and does not end.
    """
    path, deadline = folder / MANIFEST, clock.now() + patience_s
    while True:
        try:
            descriptor = Descriptor(os.open(path, READ))
            fcntl.flock(descriptor.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor.fd), os.lstat(path)):
                return descriptor
        except FileNotFoundError as error:
            raise EvictedError("was removed meanwhile, to make room", path=folder) from error
        except BlockingIOError as error:  # who removes it holds it for a moment
            if clock.now() > deadline:
                holder = lock_holder(path) or UNSEEN
                raise BusyError(f"{holder} has had it for itself for {patience_s:g} s", path=path) from error
            time.sleep(_LOOK_S)
        except OSError as error:
            if error.filename is not None:  # it cannot be opened
                raise
            return descriptor  # it cannot be locked


@dataclass(frozen=True)
class Lease:
    """A note that copies are kept for a job.

    Attributes:
        path: Path of the note.
        job: Number of the job, as the scheduler gives it.
        process: Process that has written it.
        until: Time when the job ends, in seconds since 1970.
    """

    path: Path
    job: str
    process: ProcessId
    until: float

    @classmethod
    def read(cls, path: Path) -> Lease | None:
        """Read a note; None if it cannot be read, or neither root nor the folder's owner has written it."""
        try:
            fields = json.loads(read_own(path, os.stat(path.parent).st_uid))
            return cls(path, str(fields["job"]), ProcessId.read(fields), float(fields["until"]))
        except StagingError as error:
            _warn_once(str(error))
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def is_valid(self) -> bool:
        """Return whether the job may still run: its time is not over, nor has its node booted since.

        Hosts of one name can see the same note only on a shared filesystem. There, another boot may be another host's.
        """
        if time.time() >= self.until:
            return False
        boots = {self.process.boot, boot_id()} - {""}
        if self.process.host != socket.gethostname() or len(boots) < 2:
            return True
        return mounted_as(self.path.parent) in (*NETWORK_FILESYSTEMS, UNKNOWN)


def keep_for_job(local: Path, job: str, environ: Mapping[str, str]) -> Path | None:
    """Keep the copies in a folder until the job ends, unless the folder is another user's.

    Args:
        local: Folder of the copies. It is made if it is not there.
        job: Number of the job; "" outside a job, and nothing is kept.
        environ: Environment variables, which may tell when the job ends.

    Returns:
        The note, if there was none of this job.
    """
    if not job:
        return None
    end = job_end(environ, time.time()) or time.time() + _KEEP_S
    fields = {"job": job, **asdict(ProcessId.here()), "until": end}
    path = local / f".keep-{re.sub(r'[^A-Za-z0-9_.-]', '_', job)[:100]}.json"
    for _ in range(100):
        try:
            make_folder(local, OWN_MODE)
            if os.stat(local).st_uid != os.geteuid():
                return None
            remove_ended(local)  # no epilog has done it
            is_new = not os.path.lexists(path)
            with atomic_write(path, alone=False, is_own=True) as file:
                file.write(json.dumps(fields).encode())
            return path if is_new else None
        except FileNotFoundError:  # another process removes the empty folder at this moment
            continue
        except OSError as error:
            logger.warning("%s cannot be kept for job %s: %s", local, job, error.strerror)
            return None
    return None


def remove_ended(folder: Path, ended: str = "") -> list[Path]:
    """Remove the notes of jobs whose time is over, or that ran before the node booted; return these notes.

    Args:
        folder: Folder of the notes; those of other users stay.
        ended: Number of a job that has ended before its time.
    """
    removed = []
    for lease in leases_in(folder):
        if not lease.is_valid() or lease.job == ended:
            with suppress(OSError):  # it is another user's, or another process has removed it
                lease.path.unlink()
                removed.append(lease.path)
    return removed


def leases_in(folder: Path) -> Iterator[Lease]:
    """Iterate over the notes in a folder that keep its copies for jobs, also for those that have ended."""
    for name in sorted(list_entries(folder)):
        if LEASE.fullmatch(name) and (lease := Lease.read(folder / name)):
            yield lease


def is_pinned(folder: Path) -> bool:
    """Return whether a folder has been pinned, by its owner or by root."""
    with suppress(OSError):  # it is not, or is removed at this moment
        problem = find_problem(os.lstat(folder / PINNED), os.stat(folder).st_uid)
        if problem:
            _warn_once(f"{folder / PINNED}: {problem}, so it is not believed: remove it")
        return not problem
    return False


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
