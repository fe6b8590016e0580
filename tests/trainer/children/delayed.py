"""`trainer`, which takes longer in each step: delayed.py WHAT, and then the words of the command.

WHAT takes longest, on a machine however busy: "data", "host", "compute", or what does on its own ("").
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from datapipe.loaders import base
from trainer.cli import main
from trainer.run import loop

LEAST_S, FACTOR = 0.1, 4  # of what a step takes


def delay(what: str) -> None:
    """Have it take longer."""
    real_iter, real_update, matrix = base.Loader.__iter__, loop._update, torch.rand(600, 600)
    longest_s, since = 0.0, 0.0

    def wait_s() -> float:
        """Return the seconds that outweigh all else in a step so far, from the end of one wait to the next."""
        nonlocal longest_s
        longest_s = max(longest_s, time.monotonic() - since if since else 0)
        return max(LEAST_S, FACTOR * longest_s)

    def sleep() -> None:
        nonlocal since
        time.sleep(wait_s())
        since = time.monotonic()

    def load(loader: Any) -> Iterator[Any]:
        for batch in real_iter(loader):
            sleep()
            yield batch

    def update(*arguments: Any) -> None:
        nonlocal since
        if what == "host":
            sleep()
        else:
            end = time.monotonic() + wait_s()
            while time.monotonic() < end:
                matrix @ matrix
            since = time.monotonic()
        real_update(*arguments)

    if what == "data":
        base.Loader.__iter__ = load
    else:
        loop._update = update


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what:
        delay(what)
    sys.exit(main())
