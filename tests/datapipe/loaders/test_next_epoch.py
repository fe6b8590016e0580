"""The order of an epoch is worked out in a thread, while the last batches of the one before it run."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from datapipe.loaders import engine, open_loader
from tests.waiting import limit_s

ORDERS = [{}, {"order": "blocks"}, {"train": False}]


@pytest.fixture
def open_noting(packed_folders, monkeypatch):
    """open_noting(setting=value…) -> a loader, and (epoch, thread) of each plan that it has made."""
    loaders = []
    monkeypatch.setattr(engine, "STEPS_TO_PLAN", 3)

    def open_noting(**settings):
        loader, plans = open_loader(packed_folders["tar"] / "train", 4, size=8, threads=1, **settings), []
        plan_epoch = loader.source.plan_epoch

        def note(loader, part):
            plans.append((part.epoch, threading.current_thread()))
            return plan_epoch(loader, part)

        monkeypatch.setattr(loader.source, "plan_epoch", note)
        loaders.append(loader)
        return loader, plans

    yield open_noting
    for loader in loaders:
        loader.close()


def samples(batches):
    return np.concatenate([batch.samples.numpy() for batch in batches])


@pytest.mark.parametrize("settings", ORDERS, ids=str)
def test_the_next_epoch_is_planned_while_the_last_batches_run(open_noting, settings):
    loader, plans = open_noting(**settings)
    batches = iter(loader)
    for _ in range(len(loader) - 1):
        next(batches)
    epochs = [0, 1] if loader.options.train else [0]  # evaluations are alike, and need no other plan
    loader._last_plan._last[1].result(limit_s())
    assert [epoch for epoch, _ in plans] == epochs  # and one batch is still to be taken
    list(batches)
    loader.set_epoch(1)
    following = iter(loader)
    first = next(following)
    assert [epoch for epoch, _ in plans] == epochs
    assert threading.main_thread() not in {thread for _, thread in plans}
    reference, _ = open_noting(**settings)
    reference.set_epoch(1)
    np.testing.assert_array_equal(samples([first, *following]), samples(reference))


@pytest.mark.parametrize("settings", ORDERS[:2], ids=str)
def test_a_plan_that_is_not_asked_for_is_dropped(open_noting, settings):
    """After `set_epoch`, a state of another step, or a break, the samples are those of a new loader."""
    loader, plans = open_noting(**settings)
    list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    state = loader.state_dict()
    taken = samples(loader)  # continues
    loader.load_state_dict(state)
    np.testing.assert_array_equal(samples(loader), taken)
    reference, _ = open_noting(**settings)
    reference.set_epoch(7)
    np.testing.assert_array_equal(taken, samples(reference)[4:])
    loader._last_plan._last[1].result(limit_s())
    assert {epoch for epoch, _ in plans} - {1} == {0, 7, 8}  # that of epoch 1 may not even have begun
