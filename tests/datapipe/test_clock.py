"""The clock of time limits stands still while its process is stopped, and only then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from datapipe import clock, watched
from datapipe.clock import MOST_S, RunningClock
from datapipe.errors import DatapipeError
from tests.waiting import limit_s, wait_until

ROOT = Path(__file__).parents[2]
# Where `time.monotonic` is meant: it limits no wait for others, or only its own threads' end, or counts for people.
BY_MONOTONIC = {
    *("datapipe/clock.py", "datapipe/console.py", "datapipe/watched.py", "datapipe/loaders/threads.py"),
    *(
        "datapipe/packing/pace.py",
        "datapipe/packing/pipeline.py",
        "datapipe/staging/transfer.py",
        "datapipe/staging/local_copy.py",
    ),
    *("datapipe/dataset/partial_reader.py", "datapipe/dataset/local_first.py", "datapipe/dataset/shard_files.py"),
    *(
        "trainer/ranks/stop.py",
        "trainer/run/loop.py",
        "trainer/run/saving.py",
        "trainer/run/state.py",
        "trainer/measuring/repeat.py",
    ),
}


@pytest.fixture
def suspends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object] | None], None]:
    """suspends(function): at the third look at the clock, an hour has passed; `function` is called at the twentieth.

    Else each look takes half a second.
    """

    def suspends(function: Callable[[], object] | None) -> None:
        looks, now = count(1), [0.0]

        def read() -> float:
            number = next(looks)
            now[0] += 3600.0 if number == 3 else 0.5
            if number == 20 and function is not None:
                function()
            return now[0]

        running = RunningClock(lambda: 0.0)
        running._read = read
        monkeypatch.setattr(clock, "now", running.now)
        monkeypatch.setattr(watched, "time", SimpleNamespace(monotonic=read))
        monkeypatch.setattr(watched, "LOOK_S", 0.001)

    return suspends


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
        os.write(writing, " ".join(thread.name for thread in threading.enumerate()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="ascii") as pipe:
        assert "clock" in pipe.read().split()
    os.waitpid(child, 0)


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "hangs"])
def test_a_read_is_not_late_for_the_hour_in_which_its_process_was_stopped(suspends: Callable, comes: bool) -> None:
    """And one that hangs is found in its time."""
    answered = threading.Event()
    suspends(answered.set if comes else None)
    if comes:
        assert next(watched.work_on_files(lambda *_: answered.wait(limit_s()), ["shard"], Path, 100.0))
        return
    with pytest.raises(DatapipeError, match="has not been answered for 10"):
        next(watched.work_on_files(lambda *_: answered.wait(limit_s()), ["shard"], Path, 100.0))
    answered.set()


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "hangs"])
def test_a_batch_is_not_late_for_the_hour_in_which_its_process_was_stopped(suspends: Callable, comes: bool) -> None:
    batch: Future[str] = Future()
    suspends((lambda: batch.set_result("full")) if comes else None)

    def report(waited_s: float, is_over: bool) -> None:
        if is_over:
            raise TimeoutError(f"{waited_s:.0f}")

    if comes:
        assert watched.wait_for(batch, 100.0, report) == "full"
        return
    with pytest.raises(TimeoutError, match=r"^10\d$"):
        watched.wait_for(batch, 100.0, report)


def test_who_waits_for_others_goes_by_this_clock() -> None:
    paths = [path for package in ("datapipe", "trainer") for path in (ROOT / package).rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in paths if "time.monotonic" in path.read_text()} == BY_MONOTONIC
