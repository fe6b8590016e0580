"""Threads that fill batches, and waiting for them."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch

_GRACE_S = 0.5  # for what a thread is doing when it is to end

_R = TypeVar("_R")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_TaskQueue = queue.SimpleQueue[_Task | None]  # None: the thread that takes it ends


class Pool:
    """Daemon threads: one that hangs in a read must not keep the process from ending, as an executor's would.

    In them torch stays in the thread. By default every thread that calls torch gets helpers of its own, one per core:
    with several decoders they fight each other, and the training, for the cores. The process's setting stays as it is.
    """

    def __init__(self, count: int) -> None:
        self._tasks: _TaskQueue = queue.SimpleQueue()
        self._idle_s, self._ending = [0.0] * count, threading.Event()
        threads_before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(
                target=_work,
                args=(self._tasks, self._idle_s, i, self._ending, ready),
                name=f"datapipe-{i}",
                daemon=True,
            )
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(threads_before)
        # Also when nobody closes it, and at the latest before the interpreter shuts down: a daemon thread that returns
        # from C++ to Python after that aborts the process.
        self._end = weakref.finalize(self, _end, self._tasks, self.threads, self._ending)

    def submit(self, function: Callable[..., _R], *arguments: object) -> Future[_R]:
        """Have a thread call a function. Tasks are begun in the order in which they were submitted.

        Once the pool is closed, they are cancelled.
        """
        future: Future[_R] = Future()
        self._tasks.put((future, function, arguments))
        if self._ending.is_set():  # asked only now: before, the pool could be closed in between
            future.cancel()
        return future

    def idle_s(self) -> float:
        """Return the seconds that all threads together have waited for something to do."""
        return sum(self._idle_s)

    def close(self) -> None:
        """End the threads; what they have not begun is cancelled. Waits only a moment for one that hangs."""
        self._end()


class Threads(NamedTuple):
    """The threads of a loader, in one process."""

    fill: Pool
    read: Pool  # that read ahead, in order
    plan: Pool  # one, that works out what a batch's samples are


def _end(tasks: _TaskQueue, threads: list[threading.Thread], ending: threading.Event) -> None:
    ending.set()
    for _ in threads:
        tasks.put(None)
    deadline = time.monotonic() + _GRACE_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(
    tasks: _TaskQueue, idle_s: list[float], number: int, ending: threading.Event, ready: threading.Barrier
) -> None:
    torch.get_num_threads()  # a thread takes over the process's setting when it first asks; then it may differ
    torch.set_num_threads(1)
    ready.wait()
    while True:
        began = time.perf_counter()
        task = tasks.get()
        idle_s[number] += time.perf_counter() - began
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
        del task, future, function, arguments  # the memory that they refer to may be used again
