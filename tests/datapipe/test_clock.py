"""The clock of time limits stands still while its process is stopped, and else goes on."""

from __future__ import annotations

import os
import queue

import pytest

from datapipe import clock
from datapipe.clock import MOST_S, RunningClock
from tests.waiting import wait_until


def test_a_stop_counts_for_a_second_and_what_else_passes_counts_as_it_is() -> None:
    time_s = [100.0]
    running = RunningClock(lambda: time_s[0])
    began = running.now()
    for passes_s, counted_s, lost_s in (
        (0.5, 0.5, 0.0),
        (MOST_S, 1.5, 0.0),
        (3601.0, 2.5, 3600.0),
        (0.25, 2.75, 3600.0),
    ):
        time_s[0] += passes_s
        assert running.now() - began == pytest.approx(counted_s)
        assert running.lost_s == pytest.approx(lost_s)


def test_a_thread_looks_at_the_clock_while_nobody_asks() -> None:
    """Else it would take a long wait for a stop. So it does in a process that was forked, which has no such thread."""
    clock.now()
    looked = clock._clock._looked
    wait_until(lambda: clock._clock._looked > looked)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        clock.now()
        looked = clock._clock._looked
        wait_until(lambda: clock._clock._looked > looked)
        os.write(writing, b"looks")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"looks"
    os.waitpid(child, 0)


def test_what_comes_while_the_process_is_stopped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the wait is over by other clocks, and no item was there."""
    items: queue.SimpleQueue[str] = queue.SimpleQueue()
    times = iter([0.0, 0.0, 1.0, 1.0])  # of a limit of 5 s

    def look() -> float:
        try:
            return next(times)
        except StopIteration:
            if items.empty():
                items.put("came")
            return 2.0

    monkeypatch.setattr(clock, "now", look)
    assert clock.get(items, 5.0) == "came"
    monkeypatch.setattr(clock, "now", iter([0.0, 0.0, 5.0]).__next__)
    with pytest.raises(queue.Empty):
        clock.get(items, 5.0)
