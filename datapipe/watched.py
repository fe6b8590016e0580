"""Work on several files at once, in threads that are watched: a filesystem that does not answer ends it in time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from . import clock
from .errors import DatapipeError

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = tuple[int, Any, BaseException | None]  # number of the item, the result, what was raised instead
logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0  # for a read or write, unless a setting says otherwise
STREAMS = 4  # files at a time: a parallel filesystem serves several streams better than one
WARN_S = 10.0  # how often to log that a filesystem does not answer
LOOK_S = 1.0
GRACE_S = 1.0  # for the read or write that a thread is in when it should end


class Moved(Protocol):
    """Tells that something has moved, after a read or write."""

    def __call__(self, path: Path | None = None) -> None:
        """Tell it. `path`: the file that follows, if it is another one than before."""


class _Ended(Exception):
    """Raised in a thread whose result nobody waits for."""


def work_on_files(
    work: Callable[[Item, Moved], Result],
    items: Sequence[Item],
    path_of: Callable[[Item], Path],
    limit_s: float,
    count: int = STREAMS,
) -> Generator[Result, None, None]:
    """Call `work(item, moved)` for each item, in several threads, and yield the results in order.

    Closing the generator ends the threads. One that hangs in the system is left behind, and ends with the system call
    it is in.

    Args:
        work: Function that does the work, and must call `moved` after each read and write.
        items: Items to work on.
        path_of: Function that returns the file that an item is about, for messages.
        limit_s: Longest time that a read or write may take, in seconds.
        count: Number of threads.

    Raises:
        DatapipeError: Nothing moved for `limit_s` seconds; names the file. And whatever `work` raises.
    """
    upcoming: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
    for number in range(len(items)):
        upcoming.put(number)
    doing: dict[int, tuple[float, Path]] = {}  # by thread: when it last moved (`clock`), and the file it is at
    ending = threading.Event()

    def run(thread: int) -> None:
        def moved(path: Path | None = None) -> None:
            if ending.is_set():
                raise _Ended
            doing[thread] = clock.now(), path or doing[thread][1]

        while not ending.is_set():
            try:
                number = upcoming.get_nowait()
            except queue.Empty:
                return
            try:
                moved(path_of(items[number]))
                answers.put((number, work(items[number], moved), None))
            except BaseException as error:
                answers.put((-1, None, error))
            finally:
                doing.pop(thread, None)

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


def in_time(function: Callable[[], Result], path: Path, limit_s: float) -> Result:
    """Call a function that reads at `path`, in a thread, and return what it returns.

    Args:
        function: Function that is called once.
        path: Path of the file or folder, for messages.
        limit_s: Longest time that it may take, in seconds.

    Raises:
        DatapipeError: It takes longer. And whatever the function raises.
    """
    with closing(work_on_files(lambda _, moved: function(), [path], lambda path: path, limit_s)) as results:
        return next(results)


def apart(function: Callable[[], Result]) -> Result:
    """Call a function in a thread, and return what it returns: a signal ends the wait, whatever the function does."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="datapipe-apart", daemon=True).start()
    while True:
        with suppress(queue.Empty):
            result, error = answers.get(timeout=LOOK_S)
            if error is not None:
                raise error
            return result


def _answer(answers: queue.SimpleQueue[Done], doing: dict[int, tuple[float, Path]], limit_s: float) -> Done:
    """Wait for the next answer of a thread. Raises DatapipeError."""
    warned = clock.now()
    while True:
        now = clock.now()
        for since, path in list(doing.values()):
            if now - since > limit_s:
                message = f"a read or write has not been answered for {now - since:.0f} s (timeout_s={limit_s:g})"
                raise DatapipeError(message, path=path)
            if now - since > WARN_S and now - warned > WARN_S:
                warned = now
                logger.warning("%s: a read or write has not been answered for %.0f s", path, now - since)
        try:
            return answers.get(timeout=min(LOOK_S, limit_s))
        except queue.Empty:
            continue
