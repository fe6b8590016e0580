"""A clock for time limits, which stands still while this process is stopped.

A scheduler suspends a job and continues it, a shell does so on Ctrl-Z and `fg`. Nothing could have moved meanwhile, and
nothing that this process waits for is late.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

_TICK_S = 0.25  # how often a thread looks at the clock
OUTLASTS_ALL = timedelta(days=365)  # for the limits of libraries: their clocks run on while the process is stopped
MOST_S = 1.0  # that count between two looks: after more than this, the process has not run in between


class RunningClock:
    """Counts the seconds in which the process runs. Thread-safe.

    Between two looks at it, whoever looks, at most MOST_S seconds pass.

    Args:
        read: Function that returns the time in seconds, which does not stand still.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._looked, self._lost_s = read(), 0.0
        self.forget_lock()

    def now(self) -> float:
        """Return the time in seconds. Two of them tell how long this process has run between them."""
        with self._lock:  # a stop between its lines changes nothing
            now = self._read()
            self._lost_s += max(0.0, now - self._looked - MOST_S)
            self._looked = now
            return now - self._lost_s

    @property
    def lost_s(self) -> float:
        """Return the seconds in which the process did not run, up to now."""
        self.now()
        return self._lost_s

    def forget_lock(self) -> None:
        """Have a new lock: after a fork, a thread of the parent may hold the old one."""
        self._lock = threading.RLock()  # a signal's handler may look while its own thread does


_clock = RunningClock()
_ticks = threading.Event()  # whether a thread looks at the clock


def now() -> float:
    """Return the seconds in which this process has run, from some time on."""
    if not _ticks.is_set():
        _ticks.set()
        with suppress(RuntimeError):  # the interpreter goes down, and starts no more threads
            threading.Thread(target=_tick, name="clock", daemon=True).start()
    return _clock.now()


def lost_s() -> float:
    """Return the seconds in which this process was stopped, as far as known."""
    now()
    return _clock.lost_s


def _tick() -> None:
    while True:
        time.sleep(_TICK_S)
        _clock.now()


def _after_fork() -> None:
    """In the child, which has none of the parent's threads."""
    global _ticks
    _ticks = threading.Event()
    _clock.forget_lock()


os.register_at_fork(after_in_child=_after_fork)
