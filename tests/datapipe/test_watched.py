"""Work on several files at once: who has hung, and who has only ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from datapipe import clock, watched
from tests.waiting import limit_s


def test_a_thread_that_has_no_file_left_is_not_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the first thread has ended, and then advances by more than a read may take."""
    now = [0.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    both_work, may_go_on, has_moved, workers = threading.Event(), threading.Event(), threading.Event(), []

    def work(name: str, moved: Callable[[], None]) -> str:
        if name == "short":
            workers.append(threading.current_thread())
            assert both_work.wait(limit_s())
        else:
            both_work.set()
            assert may_go_on.wait(limit_s())
            moved()
            has_moved.set()
        return name

    results = watched.work_on_files(work, ["short", "long"], Path, limit_s=100.0, count=2)
    assert next(results) == "short"
    workers[0].join(limit_s())
    now[0] = 1000.0
    may_go_on.set()
    assert has_moved.wait(limit_s())
    assert next(results) == "long"
    assert [*results] == []
