"""Several files at once, each in a thread that is watched: a filesystem that does not answer ends the work in time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from .errors import DatapipeError

Item, Result = TypeVar("Item"), TypeVar("Result")
Work = Callable[[Item, Callable[[], None]], Result]
logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0  # as packing's
STREAMS = 4  # files at a time: a parallel filesystem serves several streams better than one
TELL_S = 10.0  # how often it is told that a filesystem does not answer
LOOK_S = 1.0
GRACE_S = 1.0  # for the read or write that a thread is at when it is to end


class _Ended(Exception):
    """Raised in a thread whose result nobody waits for any more."""


def work_on_files(
    work: Work, items: Sequence[Item], name: Callable[[Item], Path], limit_s: float, count: int = STREAMS
) -> Iterator[Result]:
    """Call `work(item, moved)` for each item, in `count` threads, and yield the results in order.

    `work` has to call `moved` after each read and write. A generator: closing it ends the threads, of which one that
    hangs in the system is left behind, and does no more than what it is at.

    Raises: what `work` raises; DatapipeError with `name(item)` where nothing moved for `limit_s` seconds.
    """
    upcoming, answers = queue.SimpleQueue(), queue.SimpleQueue()
    for number in range(len(items)):
        upcoming.put(number)
    doing: dict[int, tuple[float, Path]] = {}  # since when, by the thread
    ending = threading.Event()

    def run(me: int) -> None:
        def moved() -> None:
            if ending.is_set():
                raise _Ended
            doing[me] = time.monotonic(), path

        while not ending.is_set():
            try:
                number = upcoming.get_nowait()
            except queue.Empty:
                return
            try:
                path = name(items[number])
                moved()
                answers.put((number, work(items[number], moved), None))
            except BaseException as error:
                answers.put((-1, None, error))
            finally:
                doing.pop(me, None)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(min(count, len(items)))]
    for thread in threads:
        thread.start()
    try:
        ready: dict[int, Result] = {}
        for number in range(len(items)):
            while number not in ready:
                which, result, error = _answer(answers, doing, limit_s)
                if error is not None:
                    raise error
                ready[which] = result
            yield ready.pop(number)
    finally:
        ending.set()
        deadline = time.monotonic() + GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _answer(answers: queue.SimpleQueue, doing: dict[int, tuple[float, Path]], limit_s: float) -> tuple:
    """Wait for the next answer of a thread. Raises DatapipeError."""
    told = time.monotonic()
    while True:
        now = time.monotonic()
        for since, path in list(doing.values()):
            if now - since > limit_s:
                message = f"a read or write has not been answered for {now - since:.0f} s (timeout_s={limit_s:g})"
                raise DatapipeError(message, path=path)
            if now - since > TELL_S and now - told > TELL_S:
                told = now
                logger.warning("%s: a read or write has not been answered for %.0f s", path, now - since)
        try:
            return answers.get(timeout=min(LOOK_S, limit_s))
        except queue.Empty:
            continue
