"""What both commands use."""

import os
import signal
import sys
import threading
import time
import weakref

import pytest

from datapipe import console
from tests.waiting import limit_s


class Thing:
    """What a callback, or its destructor, is about."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __del__(self) -> None:
        if self.number:
            os.kill(os.getpid(), self.number)


def in_a_callback(number: int) -> None:
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
    del thing
    assert reference() is None


def in_a_destructor(number: int) -> None:
    Thing(number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("come", [in_a_callback, in_a_destructor])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_signal_ends_a_command_wherever_it_comes(come, number, code, is_busy, monkeypatch):
    """Python drops the exception of its handler where it comes in one of these.

    `is_busy`: a thread gets far before the one that has started it continues.
    """
    if is_busy:
        monkeypatch.setattr(console, "AGAIN_S", 0)
        start = threading.Thread.start

        def start_and_wait(thread: threading.Thread) -> None:
            start(thread)
            for _ in range(1000):
                time.sleep(0)

        monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    handler, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook

    def command() -> None:
        come(number)
        assert threading.Event().wait(limit_s()), "the signal was lost"

    try:
        assert console.run(command) == code
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert sys.unraisablehook is hook
