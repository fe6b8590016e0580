"""A rank that is dead, stopped or hangs ends the run in time, and is named. Real processes, as launchers start them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from datapipe import clock
from datapipe.jobgroup.heart import BEAT_S
from tests.processes import Process, clean_environment
from tests.trainer.runs import wait_for_step
from tests.waiting import limit_s, suspend, wait_until
from trainer.ranks.heartbeat import Watch
from trainer.ranks.stop import IMPATIENT_AFTER_S

CHILD = Path(__file__).parents[1] / "children" / "watched.py"
HOST = os.uname().nodename


@pytest.fixture
def ranks(start, packed, recipe_file, port, tmp_path, patience_s):
    """ranks(2) -> processes that train together, each started by itself. `of_last`: arguments of the last.

    `what`: what one of them does, as in children/watched.py.
    """

    def _ranks(count: int, *arguments: object, what: str = "", of_last: Sequence[object] = ()) -> list[Process]:
        command = [CHILD, what] if what else ["-m", "trainer"]
        command += ["train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--set", "train.epochs=200"]
        command += ["--set", "train.batch_size=30", "--rank-timeout", patience_s, *arguments]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        others = [*command], [*command, *of_last]
        return [start(*others[rank == count - 1], env=shared | {"RANK": str(rank)}) for rank in range(count)]

    return _ranks


def errors_of(children: list[Process]) -> list[str]:
    """Return what processes, which end by themselves, have said."""
    return [child.communicate(timeout=limit_s())[1] for child in children]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "which", "words"),
    [
        (signal.SIGKILL, 1, "rank 1 ({host}) does not answer"),
        (signal.SIGKILL, 0, "rank 0 ({host}) does not answer"),
        (signal.SIGSTOP, 1, "rank 1 ({host}) has given no sign of life for"),
        pytest.param(signal.SIGSTOP, 0, "does not answer", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_others_in_time(ranks, tmp_path, number, which, words):
    children = ranks(3)
    wait_for_step(tmp_path / "run", 2, *children)
    children[which].send_signal(number)
    others = [child for child in children if child is not children[which]]
    said = errors_of(others)
    assert [child.returncode for child in others] == [1, 1], said
    assert all(words.format(host=HOST) in errors.splitlines()[-1] for errors in said), said
    assert not any("Traceback" in errors for errors in said), said
    assert (tmp_path / "run" / "failed-hosts").read_text() == f"{HOST}\n"


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_are_suspended_for_longer_than_one_may_do_nothing_train_on(ranks, tmp_path, patience_s):
    """By a scheduler, which stops all processes of a job. The watch looks several times after that."""
    children = ranks(2)
    for _ in range(2):
        wait_for_step(tmp_path / "run", 2, *children)
        suspend(children, 2 * patience_s)
        looked = time.monotonic() + 5 * BEAT_S
        wait_until(lambda looked=looked: time.monotonic() > looked, *children)
    last = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").stat().st_size > last, *children)


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_run_and_is_named(ranks, patience_s):
    children = ranks(2, what="hangs")
    said = errors_of(children)
    assert [child.returncode for child in children] == [1, 1], said
    for errors in said:
        assert f"because rank 1 ({HOST}): no progress for" in errors.splitlines()[-1], said
        assert f"in: forward pass of step 3 (--rank-timeout {patience_s})" in errors.splitlines()[-1], said
    assert "waiting: rank 1" in said[0]


@pytest.mark.ranks
@pytest.mark.parametrize("stopped", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_all_soon_though_a_rank_is_stopped(ranks, tmp_path, stopped):
    """The limit for ranks is not over by then. Where the first rank is stopped, its store is silent, too."""
    children = ranks(3, "--rank-timeout", 100_000)
    wait_for_step(tmp_path / "run", 2, *children)
    children[stopped].send_signal(signal.SIGSTOP)
    others = [child for child in children if child is not children[stopped]]
    for child in others:
        child.terminate()
    said = errors_of(others)
    assert [child.returncode for child in others] == [143, 143], said
    words = f"because SIGTERM asked for it, and rank {stopped} ({HOST}) has given no sign of life for"
    assert all(words in errors.splitlines()[-1] for errors in said), said


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, 2])
def test_a_second_ctrl_c_ends_what_computes_on(ranks, tmp_path, count):
    """Also while no Python code runs: the last rank computes for ever, and the others wait for it.

    Those that follow the first within seconds are not the second: launchers pass it on, too.
    """
    children = ranks(count, "--rank-timeout", 100_000, what="computes")
    wait_until((tmp_path / "computes").exists, *children)
    began = time.monotonic()

    def ask() -> bool:
        for child in children:
            child.send_signal(signal.SIGINT)
        return None not in [child.poll() for child in children]

    wait_until(ask)
    assert time.monotonic() - began > IMPATIENT_AFTER_S
    said = errors_of(children)
    assert [child.returncode for child in children] == [130] * count, said
    assert all("the run ends, because of a second Ctrl-C" in errors for errors in said), said


@pytest.mark.ranks
def test_a_rank_that_hangs_while_it_opens_the_data_set_ends_the_run(ranks, packed, tmp_path, patience_s):
    """A FIFO in place of a manifest hangs whoever opens it."""
    data = shutil.copytree(packed, tmp_path / "data")
    (data / "train" / "manifest.json").unlink()
    os.mkfifo(data / "train" / "manifest.json")
    children = ranks(2, of_last=["--data", data])
    said = errors_of(children)
    assert [child.returncode for child in children] == [1, 1], said
    words = f"because rank 1 ({HOST}): no progress for"
    assert all(words in errors.splitlines()[-1] for errors in said), said
    assert f"in: opening the data set (--rank-timeout {patience_s})" in said[0].splitlines()[-1], said
    assert "waiting: rank 1" in said[0]


@pytest.mark.ranks
def test_a_rank_that_is_refused_tells_the_others(ranks):
    """They wait for it."""
    children = ranks(3, of_last=["--set", "train.epochs=0"])
    said = errors_of(children)
    assert [child.returncode for child in children] == [1, 1, 2], said
    assert all("process 2 has left: train.epochs" in errors.splitlines()[-1] for errors in said[:2]), said


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_mpirun_starts_one_world(packed, recipe_file, tmp_path):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m", "trainer", "train"]
    command += [recipe_file, "--data", packed, "--out", tmp_path / "run", "--set", "train.epochs=1"]
    options = {"env": clean_environment(), "capture_output": True, "text": True, "timeout": limit_s()}
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 0 and "2 ranks" in done.stderr, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 3])
def test_a_flipped_bit_is_found_and_its_rank_named(ranks, count):
    """With two ranks it is not known which of them is right, so both are named."""
    children = ranks(count, "--set", "train.check_replicas_every_steps=2", what="flips")
    said = errors_of(children)
    assert all(child.returncode == 1 for child in children), said
    who = f"rank 1 ({HOST})" if count == 3 else f"rank 0 ({HOST}), rank 1 ({HOST})"
    assert all(
        f"error: {who}: other parameters than the other ranks after step 2, first in fc" in text for text in said
    )


def test_a_rank_that_takes_longer_than_most_is_named(caplog, monkeypatch):
    """By a tenth of the time. Seconds count for what a rank does without the others, and is not long at any rate."""
    now = 100.0
    monkeypatch.setattr(clock, "now", lambda: now)
    watch = Watch()
    for what, section, seconds in (("a batch", 0, 1.0), ("forward", 1, 3.0), ("the others", -1, 6.0)):
        watch.doing(what, section=section)
        now += seconds
    watch.doing("saving", is_long=True, section=0)
    now += 50
    watch.doing("a batch", section=0)
    spent_s = watch._describe()[4]
    assert spent_s == [1.0, 3.0]
    crew = SimpleNamespace(names=lambda ranks: f"rank {ranks}")
    for others_s, lines in (
        ([1.0, 1.9], ["slow: rank [1] spent 3.0 of 10 s in forward passes, most ranks 1.9"]),
        ([1.0, 2.1], []),
    ):
        watch._compared = now - 10, {rank: [0.0, 0.0] for rank in range(3)}
        watch._compare_speed(crew, {0: others_s, 1: spent_s, 2: others_s})
        assert caplog.messages == lines
        caplog.clear()


class FakeCrew:
    """What three ranks say of themselves, for the first of them."""

    def __init__(self) -> None:
        self.beats: dict[int, list] = {}
        self.left: dict[int, str] = {}

    def read_beats(self, ranks):
        return {rank: self.beats[rank] for rank in ranks if rank in self.beats}

    def find_left(self, ranks):
        return {rank: why for rank, why in self.left.items() if rank in ranks}

    def names(self, ranks):
        return ", ".join(f"rank {rank}" for rank in ranks)


@pytest.fixture
def judged(monkeypatch):
    """judged(seconds, beats_of) -> why the first of three ranks ends the run, whom it blames, and when; or None.

    A rank may do nothing for 60 s. `beats_of(second)`: by rank, which step it does, since when, and whether that is
    long; a rank not in it is silent.
    """
    now, crew, watch = [0.0], FakeCrew(), Watch()
    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(Watch, "_run", lambda _: None)
    watch._doing = 0, "starting", True, 0.0
    watch.start(crew, rank=0, world_size=3, timeout_s=60.0)

    def _judged(seconds, beats_of):
        for second in range(seconds):
            now[0] = float(second)
            steps = beats_of(second)
            if 0 in steps:
                number, since, is_long = steps.pop(0)
                watch._doing = number, f"step {number}", is_long, float(since)
            for rank, (number, since, is_long) in steps.items():
                crew.beats[rank] = [second, [number, f"step {number}", is_long, second - since, [0.0, 0.0]]]
            if reason := watch._judge(crew):
                return reason, watch._blamed, second
        return None

    _judged.crew = crew
    return _judged


def test_ranks_that_go_on_are_let_alone(judged):
    assert judged(300, lambda second: {rank: (second // 50, second // 50 * 50, False) for rank in range(3)}) is None


def test_a_stopped_rank_is_named_with_what_it_did_last(judged):
    def beats(second):
        going = {rank: (second, second, False) for rank in range(3)}
        return going if second < 5 else {0: going[0], 2: going[2]}

    reason, blamed, _ = judged(100, beats)
    assert reason == "rank 1 has given no sign of life for 61 s; the last was: step 4 (--rank-timeout 60)"
    assert blamed == [1]


@pytest.mark.parametrize(
    ("is_long", "limit"),
    [(False, "61 s in: step 5 (--"), (True, "601 s in: step 5 (10 times --")],
    ids=["short", "long"],
)
def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it(judged, is_long, limit):
    """It lives, but the others are in the next step since a second later."""

    def beats(second):
        step = min(second, 5)
        next_one = step + (second > 5), min(second, 6), is_long
        return {0: next_one, 1: (step, step, is_long), 2: next_one}

    reason, blamed, _ = judged(700, beats)
    assert reason == f"rank 1: no progress for {limit}rank-timeout 60)"
    assert blamed == [1]


def test_a_rank_that_has_left_is_not_waited_for(judged):
    judged.crew.left[2] = "its disk is full"
    reason, _, second = judged(60, lambda second: {rank: (second, second, False) for rank in range(3)})
    assert reason == "rank 2 has left: its disk is full" and second < 10


@pytest.mark.slow
@pytest.mark.ranks
def test_a_slow_rank_is_named(ranks):
    children = ranks(3, "--set", "train.epochs=15", what="slow")
    said = errors_of(children)
    lines = [line for line in said[0].splitlines() if "slow:" in line]
    assert lines and all(f"slow: rank 1 ({HOST}) spent" in line for line in lines), said[0]
    assert all("in forward passes" in line for line in lines)


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named_in_time(ranks, patience_s):
    """As its limit says, by its option's name; also where the first does not come, which keeps the store."""
    children = ranks(3)
    children[2].kill()
    (said,) = errors_of(children[:1])
    assert f"process 2 did not answer for {patience_s} s (--rank-timeout)" in said
    first, second = ranks(2)
    first.kill()
    (said,) = errors_of([second])
    assert f"process 0 does not answer within {patience_s} s (--rank-timeout)" in said


@pytest.mark.ranks
@pytest.mark.parametrize("left", [0, 1])
def test_a_rank_that_is_terminated_while_they_meet_is_named_at_once(ranks, left):
    """The limit is not over by then; the last rank never comes."""
    children = ranks(3, "--rank-timeout", 100_000)
    children[2].kill()
    other = children[1 - left]
    while "waiting for process 2\n" not in (line := children[0].stderr.readline()):  # and no longer for process 1
        assert line, "the first rank has ended"
    children[left].terminate()
    said = errors_of([other])[0]
    assert f"error: process {left} has left: it got SIGTERM" in said
    assert children[left].wait(limit_s()) == 143 and other.returncode == 1
