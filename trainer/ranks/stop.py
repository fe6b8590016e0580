"""Stopping on a signal, or before the time is over, at a step that all ranks agree on."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from datapipe import clock
from datapipe.errors import SettingError

from .limits import RESERVE_S
from .world import World

SIGNALS = "TERM", "INT", "USR1", "USR2"
# The system lets no process handle the first two; the others say that the process itself is broken.
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
# Launchers pass on the Ctrl-C that the terminal has already sent: that is not a second one.
IMPATIENT_AFTER_S = 3.0
_UNWIND_S = 2.0  # how long the main thread may take to end after a second one
_END_S = 6.0  # how long a run in which a rank says nothing may take to end after a signal
_LOOK_S = 0.5

_TIME_IS_OVER = 128  # as a signal's number: above all of them
TEMPORARY_FAILURE = 75  # sysexits(3): try again


class StoppedWaiting(Exception):
    """A signal came while this rank, the only one, waited for a batch."""


class StopSignal:
    """A context in which signals only set a flag, of which `agreed` informs all ranks at the same step.

    The handler saves nothing, as it may run in the middle of anything; and it runs late, as Python's handlers do, while
    the main thread waits for other ranks, or computes. A second Ctrl-C, seconds after the first signal, ends the
    process all the same, and so does the first where another rank says nothing: a thread sees to that. (Schedulers send
    several SIGTERM, and a checkpoint may just be written.)

    `number` is the signal that was agreed on, _TIME_IS_OVER, or 0; `is_due` whether a checkpoint is due.

    Args:
        world: This process's place among the ranks.
        names: The signals, without their SIG.
        ends_at: Time at which this process is to have ended, in seconds since 1970; None: the time at which it is done.

    Raises:
        SettingError: A name is not that of a signal, or of one after which nothing can be saved.
    """

    def __init__(self, world: World, names: Sequence[str] = SIGNALS, ends_at: float | None = None) -> None:
        self.number, self.is_due = 0, False
        self._ends_at = ends_at
        self.save_s: Callable[[], float] = lambda: 0.0  # how long a checkpoint takes that training does not wait for
        self._called_at, self._longest_s = 0.0, 0.0  # the last call of `agreed`, and the longest time between two
        self._world = world
        self._signals = [signal_of(name) for name in names]
        self._received = 0
        self._received_at = 0.0
        self._is_waiting = False
        self._flags = torch.zeros(2, dtype=torch.int64)
        self._sent: Any = None

    def __enter__(self) -> StopSignal:
        heard, self._hears = socket.socketpair()
        self._hears.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._hears.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._receive) for number in self._signals}
        threading.Thread(target=self._listen, args=(heard,), name="trainer-signals", daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._hears.close()  # the thread ends

    def _receive(self, number: int, _frame: object) -> None:
        if _is_second(number, self._received_at):
            raise KeyboardInterrupt
        if not self._received:
            self._received, self._received_at = number, time.monotonic()
        if self._is_waiting:
            raise StoppedWaiting

    def _listen(self, heard: socket.socket) -> None:
        """End the process where the main thread does not; `heard` has each signal's number as soon as it arrives."""
        watch, first, first_at, second_at = self._world.watch, 0, 0.0, 0.0
        with heard:
            while True:
                try:
                    numbers = heard.recv(64)
                except TimeoutError:
                    numbers = b"\0"
                if not numbers:
                    return
                for number in numbers:
                    if _is_second(number, first_at):
                        second_at = second_at or time.monotonic()
                    elif number in self._signals and not first:
                        first, first_at = number, time.monotonic()
                        watch.exit_code = 128 + number
                        heard.settimeout(_LOOK_S)
                if second_at and time.monotonic() - second_at > _UNWIND_S:
                    watch.exit_code = 128 + signal.SIGINT
                    watch.end("of a second Ctrl-C")
                silent = watch.find_silent() if first and time.monotonic() - first_at > _END_S else ""
                if silent:
                    watch.end(f"{signal.Signals(first).name} asked for it, and {silent}")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal raise StoppedWaiting in the block, where this is the only rank: others would wait for it."""
        self._is_waiting = self._world.world_size == 1
        try:
            if self._is_waiting and self._received:
                raise StoppedWaiting
            yield
        finally:
            self._is_waiting = False

    def agreed(self, is_due: bool = False) -> bool:
        """Return whether any rank received a signal before its last call; all ranks must call this equally often.

        What the ranks say in this call is sent meanwhile, so that no step waits for it.

        Args:
            is_due: Whether this rank wants a checkpoint to be saved.
        """
        self._look_at_clock()
        if self._world.world_size == 1:
            self.number, self.is_due = self._received, is_due
            return self.number != 0
        self.settle()
        if not self.number:
            self._flags[0], self._flags[1] = self._received, is_due and not self.is_due
            self._sent = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """The exit code of a process that has stopped: 128 + the signal's number; 75, where the time was over."""
        return TEMPORARY_FAILURE if self.number == _TIME_IS_OVER else 128 + self.number

    @property
    def reason(self) -> str:
        """What has stopped the run: the name of a signal, or "time"."""
        return "time" if self.number == _TIME_IS_OVER else signal.Signals(self.number).name

    def _look_at_clock(self) -> None:
        now = clock.now()
        if self._called_at:
            self._longest_s = max(self._longest_s, now - self._called_at)
        self._called_at = now
        if self._ends_at is not None and self._end_takes_s() > self._ends_at - time.time():
            self._received = self._received or _TIME_IS_OVER

    def _end_takes_s(self) -> float:
        """Return how much of the time is kept for the end: a step, or a checkpoint, may be under way by then."""
        return RESERVE_S + 2 * (self._longest_s + self.save_s())

    def settle(self) -> None:
        """Wait for what was sent; all ranks must call this before their connections end."""
        self.is_due = False
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
            number, is_due = self._flags.tolist()
            self.number, self.is_due = self.number or number, bool(is_due)


def _is_second(number: int, first_at: float) -> bool:
    return number == signal.SIGINT and bool(first_at) and time.monotonic() - first_at > IMPATIENT_AFTER_S


def signal_of(name: str) -> signal.Signals:
    """Return the signal that --stop-signals names. Raises SettingError where nothing can be saved after it."""
    try:
        number = signal.Signals[f"SIG{name.strip().upper().removeprefix('SIG')}"]
    except KeyError:
        raise SettingError(f"--stop-signals {name!r}: no such signal; such as {','.join(SIGNALS)}") from None
    if number in _NEVER:
        names = ",".join(SIGNALS)
        raise SettingError(
            f"--stop-signals {name}: no process can save a checkpoint after it; allowed: such as {names}"
        )
    return number
