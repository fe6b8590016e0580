"""Waiting for what a test is about to see. The limits only end a test that hangs: no test asserts them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO, TypeVar

T = TypeVar("T")
LIMIT_S = 120.0
POLL_S = 0.01


class Child(Protocol):
    """What is needed of a process that is waited for."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def communicate(self, *, timeout: float | None) -> tuple[str, str]: ...
    def send_signal(self, number: int) -> None: ...


def limit_s(seconds: float = LIMIT_S) -> float:
    """Return a limit for a quiet machine as one for this machine, which may be busy."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], T], *children: Child, describe: Callable[[], object] = str) -> T:
    """Return the first true value of a condition.

    Args:
        condition: What is asked again and again.
        children: Processes that must not end before.
        describe: Text for the failure message, of what there is instead.

    Raises:
        AssertionError: A process has ended, or nothing has come true before the limit.
    """
    end = time.monotonic() + limit_s()
    while not (value := condition()):
        for child in children:
            assert child.poll() is None or condition(), f"a process has ended: {child.communicate(timeout=LIMIT_S)}"
        assert time.monotonic() < end, f"did not happen in time: {describe()}"
        time.sleep(POLL_S)
    return value


def read_until(text: str, pipe: TextIO, child: Child) -> str:
    """Return what a child prints up to the end of the first line that contains a text. A child that is late is killed.

    Args:
        text: What is waited for; "": any line.
        pipe: The child's output or errors.
        child: The process at the other end.

    Raises:
        AssertionError: The pipe has ended, or the limit has passed, without such a line.
    """
    lines: list[str] = []

    def read() -> None:
        for line in iter(pipe.readline, ""):
            lines.append(line)
            if text in line:
                break

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(limit_s())
    if lines and text in lines[-1]:
        return "".join(lines)
    if reader.is_alive():
        child.kill()  # which ends the reader, too
        raise AssertionError(f"{text!r} was not printed in time: {lines}")
    raise AssertionError(f"{text!r} was not printed: {lines}, {child.communicate(timeout=limit_s())}")


def suspend(children: Iterable[Child], seconds: float) -> None:
    """Stop processes for some time and continue them, as a scheduler does with a job."""
    children, end = [*children], time.monotonic() + seconds
    for child in children:
        child.send_signal(signal.SIGSTOP)
    wait_until(lambda: time.monotonic() > end)
    for child in children:
        child.send_signal(signal.SIGCONT)
