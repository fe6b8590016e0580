"""Run `datapipe`, print its changes of the disk, and send this process a signal before one of them.

Arguments: the signal's number, that of the change (-1: none), how folders are locked ("as they are", "not at all",
"unseen by others"), and those of `datapipe`.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import sys

from datapipe.cli import main

EVENTS = "os.rename", "os.remove", "os.rmdir", "os.mkdir"


def signal_at(number: int, at: int) -> None:
    """Print a line for each change, and send the signal before the one with the number `at`."""
    numbers = itertools.count()

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            if next(numbers) == at:
                os.kill(os.getpid(), number)
            os.write(sys.stdout.fileno(), f"{event} {arguments}\n".encode())

    sys.dont_write_bytecode = True  # which would be changes, too
    sys.addaudithook(look)


def lock(kind: str) -> None:
    """Have no locks, as on a filesystem mounted without `flock`, or such as other nodes do not see."""

    def flock(file: object, operation: int) -> None:
        if kind == "not at all":
            raise OSError(errno.ENOSYS, "no locks here")

    if kind != "as they are":
        fcntl.flock = flock


if __name__ == "__main__":
    number, at, kind = (sys.argv.pop(1) for _ in range(3))
    lock(kind)
    signal_at(int(number), int(at))
    sys.exit(main())
