"""What may stop a run: which signals, and how soon."""

from __future__ import annotations

import logging
import signal
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe import clock
from datapipe.errors import SettingError
from trainer.ranks.limits import RESERVE_S, find_end, parse_limit, warn_if_short
from trainer.ranks.stop import SIGNALS, StopSignal, signal_of
from trainer.ranks.world import World
from trainer.run.run import RunOptions


@pytest.mark.parametrize("number", signal.Signals, ids=lambda number: number.name)
def test_each_signal_is_refused_or_stops_a_run(number):
    """Those that Python does not let anyone handle are among the refused."""
    try:
        assert signal_of(number.name.removeprefix("SIG").lower()) == signal_of(f" {number.name} ") == number
    except SettingError as error:
        assert "no process can save a checkpoint after it; allowed: such as TERM,INT,USR1,USR2" in str(error)
        assert number.name.removeprefix("SIG") not in SIGNALS
        return
    before = signal.getsignal(number)
    with StopSignal(World(), [number.name]) as stop:
        signal.raise_signal(number)
        assert stop.agreed() and stop.reason == number.name and stop.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", ["KILL", "SIGSTOP", "kill", "NOSUCH", "", "9"])
def test_a_name_after_which_nothing_can_be_saved_is_refused(name):
    with pytest.raises(SettingError, match=r"^--stop-signals .*such as TERM,INT,USR1,USR2$"):
        RunOptions(stop_signals=["TERM", name])


@pytest.mark.parametrize(
    ("option", "words"), [("--stop-signals=TERM,KILL", "--stop-signals KILL"), ("--max-time=0:20", "is 20 s")]
)
def test_it_is_refused_before_the_run_begins(cli, packed, recipe_file, tmp_path, option, words):
    out = tmp_path / "run"
    code, _, errors = cli("train", recipe_file, "--data", packed, "--out", out, option)
    assert code == 2 and "error: --" in errors and words in errors and not out.exists()


@given(st.integers(1, 100_000))
def test_a_time_limit_leaves_room_for_a_step(seconds):
    text = f"0:{seconds}"
    if seconds > RESERVE_S:
        assert parse_limit("--max-time", text) == seconds
        assert find_end({}, text, 1000.0) == 1000 + seconds
        assert find_end({"SLURM_JOB_END_TIME": "1010"}, text, 1000.0) == 1010  # the job's, which is not refused
        return
    with pytest.raises(SettingError, match=rf"--max-time {text}: is {seconds} s, of which 30 s are kept.*allowed"):
        find_end({}, text, 1000.0)


def test_nothing_limits_a_run():
    assert find_end({}, None, 1000.0) is None


@pytest.mark.parametrize(("ends_at", "left"), [(None, None), (1031, None), (1030, 30), (1012.4, 12), (990, 0)])
def test_who_has_time_for_a_single_step_is_told(caplog, ends_at, left):
    caplog.set_level(logging.WARNING)
    warn_if_short(ends_at, 1000.0)
    assert [record.getMessage().partition(" s are left")[0] for record in caplog.records] == (
        [] if left is None else [str(left)]
    )


def test_a_suspension_is_not_the_length_of_a_step(monkeypatch):
    """Twice that of the longest one is kept for the end: a run would stop at once that has hours left."""
    stop, running = StopSignal(World(), ends_at=time.time() + 3600), clock.RunningClock(lambda: 0.0)
    running._read = iter([0.0, 0.5, 3600.0, 3600.5]).__next__
    monkeypatch.setattr(clock, "now", running.now)
    monkeypatch.setattr("trainer.ranks.stop.time", SimpleNamespace(monotonic=running._read, time=time.time))
    assert not any(stop.agreed() for _ in range(4)) and stop._longest_s <= 1
