"""Threads that fill batches."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import torch

from ..errors import DatapipeError

logger = logging.getLogger(__name__)

GRACE_S = 0.5  # for what a thread is doing when it is to end
TELL_S = 10.0  # how often somebody who waits is told what for


def wait_for(future: Future, limit_s: float, tell: Callable[[float, bool], None]) -> Any:
    """The future's result. Each 10 s `tell` is called with the seconds waited and False, after `limit_s` with True."""
    asked = time.monotonic()
    while True:
        left = asked + limit_s - time.monotonic()
        try:
            return future.result(max(0.0, min(TELL_S, left)))
        except NotYet:
            if future.done():  # meanwhile, or the task itself raised a TimeoutError
                return future.result()
            tell(time.monotonic() - asked, left <= 0)


def in_time(limit_s: float, path: Path | str, doing: str, function: Callable, *arguments) -> Any:
    """Call a function that reads at `path`, in a thread, and return what it returns.

    Each 10 s it is logged that `doing` takes so long. Raises DatapipeError after `limit_s` seconds, naming `path`, and
    what the function raises.
    """

    def tell(waited_s: float, is_over: bool) -> None:
        message = f"{doing} has not been answered for {waited_s:.0f} s"
        if is_over:
            raise DatapipeError(f"{message} (timeout_s={limit_s:g})", path=path)
        logger.warning("%s: %s", path, message)

    pool = Pool(1)
    try:
        return wait_for(pool.submit(function, *arguments), limit_s, tell)
    finally:
        pool.close()


class Pool:
    """Daemon threads: one that hangs in a read must not keep the process from ending, as an executor's would.

    In them torch stays in the thread. By default every thread that calls torch gets helpers of its own, one a core:
    with several decoders they fight each other, and the training, for the cores. The process's setting stays as it is.
    """

    def __init__(self, count: int) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._idle_s, ending = [0.0] * count, threading.Event()
        threads_before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(
                target=_work, args=(self._tasks, self._idle_s, i, ending, ready), name=f"datapipe-{i}", daemon=True
            )
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(threads_before)
        # Also when nobody closes it, and at the latest before the interpreter goes down: a daemon that comes back from
        # C++ after that aborts the process.
        self._end = weakref.finalize(self, _end, self._tasks, self.threads, ending)

    def submit(self, function: Callable, *arguments) -> Future:
        """Tasks are begun in the order in which they were submitted."""
        future = Future()
        self._tasks.put((future, function, arguments))
        return future

    def idle_s(self) -> float:
        """Seconds that all threads together have waited for something to do."""
        return sum(self._idle_s)

    def close(self) -> None:
        """End the threads; what they have not begun is cancelled. Waits only a moment for one that hangs."""
        self._end()


Tasks = queue.SimpleQueue[tuple[Future, Callable, tuple] | None]


def _end(tasks: Tasks, threads: list[threading.Thread], ending: threading.Event) -> None:
    ending.set()
    for _ in threads:
        tasks.put(None)
    deadline = time.monotonic() + GRACE_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: Tasks, idle_s: list[float], number: int, ending: threading.Event, ready: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread takes over the process's setting when it first asks; then it may differ
    torch.set_num_threads(1)
    ready.wait()
    while True:
        asked = time.perf_counter()
        task = tasks.get()
        idle_s[number] += time.perf_counter() - asked
        if task is None:
            return
        future, function, arguments = task
        if ending.is_set():
            future.cancel()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del task, future, function, arguments  # what they hold may be used again
