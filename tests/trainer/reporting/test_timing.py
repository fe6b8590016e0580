"""The clock of a run."""

import pytest

from trainer.reporting.runlog import wait_share
from trainer.reporting.timing import Clock


def test_clock_counts_sections_and_goes_on():
    clock = Clock()
    clock.add_step(1.0, 10.0, 13.0, 14.0)
    clock.add_step(5.0, 15.0, 18.0, 20.0)  # waited 5 s, but only 1 s passed between the steps
    clock.drain()
    time_s = clock.total()
    assert (time_s["wait"], time_s["forward_backward"], time_s["optimizer"]) == (2.0, 6.0, 3.0)
    assert wait_share(time_s) == pytest.approx(2 / 11)
    clock.begin_epoch()
    assert clock.epoch()["forward_backward"] == 0.0
    later = Clock()
    later.load_state_dict(clock.state_dict() | {"elapsed_s": 100.0})
    assert later.elapsed_s == pytest.approx(100.0, abs=1.0)
    assert later.total()["forward_backward"] == 6.0
    before = clock.state_dict()
    before["epoch_start"] |= {"elapsed": 3.0}  # as earlier versions saved it
    del before["time_s"]["staging"], before["epoch_start"]["start"]
    later.load_state_dict(before)
    assert later.epoch() == pytest.approx(clock.epoch(), abs=1.0)


def test_what_comes_before_the_first_step_is_apart(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    clock = Clock()
    with clock.section("staging"):
        now_s += 1
    now_s += 2
    with clock.section("compile"):
        now_s += 4
    clock.end_start()
    now_s += 8
    time_s = clock.total()
    assert (time_s["staging"], time_s["start"], time_s["compile"], time_s["other"]) == (1, 2, 4, 8)
    assert (clock.elapsed_s, clock.training_s) == (15, 8)
