"""A run has one owner, on filesystems with locks and without, and a dead owner's run is taken over."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from datapipe import clock
from datapipe.errors import SettingError
from tests.processes import ProcessServer
from tests.waiting import limit_s, wait_until
from trainer.run import owner
from trainer.run.owner import DEAD_S, NOTE, own

CHILD = Path(__file__).parents[1] / "children" / "without_locks.py"
ELSEWHERE = {"host": "elsewhere", "boot": "1", "namespace": "pid:[1]", "pid": 7, "started": "1"}


@pytest.fixture(params=["locks", "no locks"])
def has_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the filesystem has locks. One that has none answers as NFS does, if a file cannot be written to."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    if request.param == "no locks":
        monkeypatch.setattr("fcntl.flock", refuse)
    return request.param == "locks"


def lose(reason: str) -> None:
    pytest.fail(f"the run was lost: {reason}")


def owned(run: Path) -> Iterator[None]:
    return own(run, "4711", lose)


def write_note(run: Path, **process: object) -> bytes:
    content = json.dumps({"process": ELSEWHERE | process, "job": "12", "began": time.time() - 7200}).encode()
    (run / NOTE).write_bytes(content)
    return content


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], None]], list[float]]:
    """looks(function) -> the pauses so far. Each takes no time, and `function` is called with its seconds."""
    now, pauses = [0.0], []

    def looks(function: Callable[[float], None]) -> list[float]:
        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            now[0] += seconds
            function(seconds)

        monkeypatch.setattr(owner, "time", SimpleNamespace(time=time.time, sleep=sleep))
        monkeypatch.setattr(clock, "now", lambda: now[0])
        return pauses

    return looks


def test_a_second_start_is_refused_and_told_who_trains_there(tmp_path: Path, has_locks: bool) -> None:
    with owned(tmp_path):
        with pytest.raises(SettingError) as refusal, owned(tmp_path):
            pass
        who = (
            f"another process trains there: process {os.getpid()} on {socket.gethostname()}, job 4711; it began 0:00:0"
        )
        assert str(refusal.value).startswith(f"--out {tmp_path}: {who}"), refusal.value
    assert not [*tmp_path.iterdir()]
    with owned(tmp_path):  # which is free again
        pass


def test_the_run_of_an_owner_that_was_killed_is_taken_over_though_its_child_lives(
    tmp_path: Path, has_locks: bool, looks: Callable
) -> None:
    """A lock lasts until all processes have closed its file: the child of a fork has it open, too."""
    pauses = looks(lambda _: None)
    reading, writing = os.pipe()
    killed = os.fork()
    if killed == 0:
        with owned(tmp_path):
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until the test ends
            os._exit(0)
    os.waitpid(killed, 0)
    try:
        assert (tmp_path / NOTE).exists()
        with owned(tmp_path):
            assert json.loads((tmp_path / NOTE).read_bytes())["process"]["pid"] == os.getpid()
        assert pauses == ([] if has_locks else [owner.CONFIRM_S])
    finally:
        os.close(writing)
        os.close(reading)


def test_an_owner_elsewhere_that_gives_a_sign_of_life_is_left_alone(
    tmp_path: Path, has_locks: bool, looks: Callable
) -> None:
    """Also where there are locks: those of other hosts may not be seen here."""
    note = write_note(tmp_path)

    def beat(_: float) -> None:
        if len(pauses) == 10:
            os.utime(tmp_path / NOTE)

    os.utime(tmp_path / NOTE, (1, 1))
    pauses = looks(beat)
    with (
        pytest.raises(SettingError, match="trains there: process 7 on elsewhere, job 12; it began 2:00:00 ago"),
        owned(tmp_path),
    ):
        pass
    assert len(pauses) == 10 and (tmp_path / NOTE).read_bytes() == note


def test_an_owner_elsewhere_that_gives_none_has_lost_the_run(tmp_path: Path, has_locks: bool, looks: Callable) -> None:
    write_note(tmp_path)
    pauses = looks(lambda _: None)
    with owned(tmp_path):
        assert json.loads((tmp_path / NOTE).read_bytes())["job"] == "4711"
    assert sum(pauses) > DEAD_S


def test_of_two_that_take_over_at_once_the_last_one_has_the_run(
    tmp_path: Path, looks: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda fd, operation: os.close(-1))  # no locks
    write_note(tmp_path)
    looks(lambda seconds: seconds == owner.CONFIRM_S and write_note(tmp_path, pid=8))
    with pytest.raises(SettingError, match="process 8 on elsewhere"), owned(tmp_path):
        pass
    assert (tmp_path / NOTE).exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write_note, "process 7 on elsewhere, job 12 has taken over {run}"),
        (lambda run: (run / NOTE).unlink(), "{run}/.owner is gone: another process"),
    ],
    ids=["taken over", "removed"],
)
def test_an_owner_that_was_cut_off_learns_that_the_run_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], reason: str
) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    reasons: list[str] = []
    with own(tmp_path, "4711", reasons.append):
        touched = (tmp_path / NOTE).stat().st_mtime_ns
        wait_until(lambda: (tmp_path / NOTE).stat().st_mtime_ns > touched)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "trainer-owner")
        change(tmp_path)
        thread.join(limit_s())
        left = [*tmp_path.iterdir()]
    assert reasons[0].startswith(reason.format(run=tmp_path))
    assert [*tmp_path.iterdir()] == left  # what another process has written is its own


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes host names of their own")
def test_a_run_that_was_taken_over_from_a_suspended_owner_is_trained_once(
    server: ProcessServer, packed: Path, recipe_file: Path, tmp_path: Path
) -> None:
    """Without locks, a second owner is refused while the first gives signs of life."""
    run = tmp_path / "run"
    words = ["train", recipe_file, "--data", packed, "--out", run, "--device", "cpu", "--resume"]
    words += ["--set", "train.checkpoint_every_steps=5", "--set"]
    first = server.start(CHILD, *words, "train.epochs=1000", host="node0")
    wait_until((run / "checkpoint.pt").exists, first)
    refused = server.run(CHILD, *words, "train.epochs=1000", host="node1")
    assert refused.returncode == 2 and f"another process trains there: process {first.pid} on node0" in refused.stderr
    first.send_signal(signal.SIGSTOP)
    second = server.start(CHILD, *words, "train.epochs=1000", host="node1")
    wait_until(lambda: str(second.pid) in (run / NOTE).read_text(), second)
    first.send_signal(signal.SIGCONT)
    errors = first.communicate(timeout=limit_s())[1]
    assert first.returncode == 1
    assert f"error: the run ends, because process {second.pid} on node1 has taken over {run}" in errors, errors
    second.terminate()
    said = second.communicate(timeout=limit_s())
    assert second.returncode == 128 + signal.SIGTERM, said
    assert not (run / NOTE).exists()
