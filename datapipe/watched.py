"""Calls that may hang, and work on several files at once, in threads that are watched: what hangs ends in time."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from . import clock
from .errors import DatapipeError

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = tuple[int, Any, BaseException | None]  # number of the item, the result, what was raised instead
logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0  # for a read or write, unless a setting says otherwise
STREAMS = 4  # files at a time: a parallel filesystem serves several streams better than one
WARN_S = 10.0  # how often to log that something is not answered
LOOK_S = 1.0  # how often to see whether the time is over: if the process is stopped meanwhile, that is late
_GRACE_S = 1.0  # for the read or write that a thread is in when it should end


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
    common = _Common(work, items, path_of)
    threads = [threading.Thread(target=common.run, args=(i,), daemon=True) for i in range(min(count, len(items)))]
    for thread in threads:
        thread.start()
    try:
        ready: dict[int, Result] = {}
        for number in range(len(items)):
            while number not in ready:
                which, result, error = _answer(common.answers, common.doing, limit_s)
                if error is not None:
                    raise error
                ready[which] = result
            yield ready.pop(number)
    finally:
        common.ending.set()
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Common(Generic[Item, Result]):
    """What the threads of `work_on_files` share.

    Attributes:
        answers: Results, as they come.
        doing: By thread, when it last moved (`clock`), and the file that it is at.
        ending: Set when the threads are to end.
    """

    def __init__(
        self, work: Callable[[Item, Moved], Result], items: Sequence[Item], path_of: Callable[[Item], Path]
    ) -> None:
        self._work, self._items, self._path_of = work, items, path_of
        self._upcoming: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(items)):
            self._upcoming.put(number)
        self.answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.doing: dict[int, tuple[float, Path]] = {}
        self.ending = threading.Event()

    def run(self, thread: int) -> None:
        """Work on one item after the other, in a thread."""

        def moved(path: Path | None = None) -> None:
            if self.ending.is_set():
                raise _Ended
            self.doing[thread] = clock.now(), path or self.doing[thread][1]

        while not self.ending.is_set():
            try:
                number = self._upcoming.get_nowait()
            except queue.Empty:
                return
            try:
                moved(self._path_of(self._items[number]))
                self.answers.put((number, self._work(self._items[number], moved), None))
            except BaseException as error:
                self.answers.put((-1, None, error))
            finally:
                self.doing.pop(thread, None)


def call(
    function: Callable[[], Result],
    limit_s: float | None,
    path: Path | str,
    doing: str = "a read or write",
    is_quiet: bool = False,
) -> Result:
    """Call a function that may hang, in a thread, and return what it returns. A signal ends the wait.

    Args:
        function: Function that is called once.
        limit_s: Longest time that it may take, in seconds; None: any.
        path: File, folder or host that may not answer, for messages.
        doing: Words that name what the function does, for messages: every 10 s it is logged that it is waited for.
        is_quiet: Whether that is not logged, since it may well take so long.

    Raises:
        DatapipeError: It takes longer; names `path`. And whatever the function raises.
    """

    def report(waited_s: float, is_over: bool) -> None:
        if is_over or not is_quiet:
            _report(waited_s, limit_s if is_over else None, path, doing)

    return wait_for(begin(function), math.inf if limit_s is None else limit_s, report)


def begin(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a thread that Python does not wait for when it ends, and return its result to come."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="datapipe-call", daemon=True).start()
    return future


def wait_for(future: Future[Result], limit_s: float, report: Callable[[float, bool], None]) -> Result:
    """Wait for a future, and return its result.

    Args:
        future: The result to wait for.
        limit_s: Seconds, after which `report` is called with True; it raises then.
        report: Function called every 10 s with the seconds waited, and False.

    Raises:
        Exception: The future's task or `report` has raised it.
    """
    began = reported = clock.now()
    while True:
        left = began + limit_s - clock.now()
        try:
            return future.result(max(0.0, min(LOOK_S, WARN_S, left)))
        except NotYet:
            if future.done():  # meanwhile, or the task itself raised a TimeoutError
                return future.result()
            now = clock.now()
            if left <= 0 or now - reported >= WARN_S:
                reported = now
                report(now - began, left <= 0)


def _report(waited_s: float, limit_s: float | None, path: Path | str, doing: str = "a read or write") -> None:
    """Log that something has not been answered; if it had a limit, which is over, raise that as DatapipeError."""
    message = f"{doing} has not been answered for {waited_s:.0f} s"
    if limit_s is not None:
        raise DatapipeError(f"{message} (timeout_s={limit_s:g})", path=path)
    logger.warning("%s: %s", path, message)


def _answer(answers: queue.SimpleQueue[Done], doing: dict[int, tuple[float, Path]], limit_s: float) -> Done:
    """Wait for the next answer of a thread. Raises DatapipeError."""
    warned = clock.now()
    while True:
        now = clock.now()
        for since, path in list(doing.values()):
            if now - since > limit_s:
                _report(now - since, limit_s, path)
            if now - since > WARN_S and now - warned > WARN_S:
                warned = now
                _report(now - since, None, path)
        try:
            return answers.get(timeout=min(LOOK_S, limit_s))
        except queue.Empty:
            continue
