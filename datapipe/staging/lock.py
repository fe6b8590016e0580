"""The lock of a local folder: who waits for it says so, names the holder, and does not wait for one that is stuck."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import StagingError
from ..fsio import lock_holder, locked

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between looks at a lock that another process holds
SAY_S = 10.0  # how often to say who holds it


@contextmanager
def hold_lock(folder: Path, patience_s: float) -> Iterator[bool]:
    """Hold a folder's lock. Wait for another process, and say so, as long as something changes in the folder.

    Args:
        folder: must exist.
        patience_s: how long nothing may change before the other process counts as stuck, in seconds.

    Yields:
        whether it is locked: some filesystems have no locks.

    Raises:
        StagingError: the other process does nothing.
    """
    said, deadline, state = float("-inf"), time.monotonic() + patience_s, _state_of(folder)
    with ExitStack() as stack:
        while True:
            try:
                is_locked = stack.enter_context(locked(folder, wait=False))
                break
            except BlockingIOError:
                holder = lock_holder(folder) or "another process"
            now = time.monotonic()
            if state != (state := _state_of(folder)):
                deadline = now + patience_s
            if now > deadline:
                message = f"{holder} holds its lock, and nothing has changed for {patience_s:g} s (timeout_s)"
                raise StagingError(f"{message}; end it, or choose another folder", path=folder)
            if now - said > SAY_S:
                said = now
                logger.info("%s: waiting for %s, which holds its lock", folder, holder)
            time.sleep(LOOK_S)
        yield is_locked


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes while a process copies: names, times, and space taken."""
    entries = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            info = entry.stat(follow_symlinks=False)
            entries.append((entry.name, info.st_mtime_ns, info.st_blocks))
    return sorted(entries)
