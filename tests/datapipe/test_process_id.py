"""Who a process is, whether it lives, and what a child of it does not keep."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from datapipe import fsio, locks
from datapipe.fsio import boot_id
from datapipe.locks import locked
from datapipe.process_id import ProcessId
from tests.waiting import limit_s


def test_whether_a_process_lives_is_known_where_it_would_be_seen() -> None:
    me = ProcessId.here()
    assert ProcessId.read(vars(me)) == me and me.find_state() == "alive"
    assert replace(me, started="1").find_state() == "ended"  # another one has its number now
    for elsewhere in (
        {"host": "node7"},
        {"boot": "another"},
        {"namespace": "pid:[1]"},
        {"namespace": ""},
        {"boot": ""},
    ):
        assert replace(me, **elsewhere).find_state() == "unknown"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    zombie = ProcessId.here(child)
    os.waitpid(child, 0)
    assert zombie.find_state() == "ended"


def test_without_a_boot_id_hosts_are_told_apart_by_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container whose /proc has process numbers alone."""
    monkeypatch.setattr(fsio, "BOOT_ID", tmp_path / "boot_id")
    assert boot_id() == boot_id() == ""
    (line,) = caplog.messages
    assert f"{tmp_path}/boot_id" in line and line.endswith("hosts are told apart by their names alone")
    assert ProcessId.here().find_state() == "unknown"


def test_a_lock_is_waited_for_where_its_holders_cannot_be_seen(tmp_path: Path, monkeypatch, caplog) -> None:
    """In a container whose /proc has process numbers alone."""
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    waiting = threading.Event()
    monkeypatch.setattr(locks.logger, "info", lambda *_: waiting.set())

    def hold_too() -> None:
        with locked(tmp_path, wait=True):
            pass

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path, wait=False):
            future = pool.submit(hold_too)
            assert waiting.wait(limit_s())
        assert future.result(limit_s()) is None


def test_a_child_of_a_fork_does_not_keep_a_lock(tmp_path: Path) -> None:
    """It may outlive its parent, and the lock lasts until all have closed the file. Nor does it free its parent's."""
    reading, writing = os.pipe()
    with locked(tmp_path, wait=False):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        ended = os.fork()
        if ended == 0:
            os._exit(0)
        os.waitpid(ended, 0)
        with pytest.raises(BlockingIOError), locked(tmp_path, wait=False):
            pass
    try:
        with locked(tmp_path, wait=False) as is_locked:
            assert is_locked
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
