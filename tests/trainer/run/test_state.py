"""The progress of a run: its mean loss, and how it ends."""

import math

import pytest
import torch

from trainer.errors import DivergedError
from trainer.ranks.world import World
from trainer.run.state import Losses, State


def _add(losses: Losses, *values: float) -> None:
    for value in values:
        losses.add(torch.tensor(value), torch.arange(3) + int(10 * value if value == value else 0))


def test_losses_are_averaged_by_line_and_by_epoch():
    losses = Losses()
    for step, value in enumerate((1.0, 2.0, 6.0), start=1):
        _add(losses, value)
        losses.read(World(), step)
    assert losses.take_line() == 3.0
    _add(losses, 11.0)
    losses.read(World(), 4)
    assert (losses.take_line(), losses.take_epoch()) == (11.0, 5.0)


def test_right_answers_are_counted_until_the_epoch_ends():
    losses = Losses()
    for step, parts in enumerate(([[3, 4]], [[1, 4], [2, 3]], []), start=1):  # the last one is not known
        losses.add(torch.tensor(1.0), torch.arange(4), [torch.tensor(part) for part in parts])
        if step == 2:
            losses.read(World(), 2)
    losses.read(World(), 3)
    again = Losses()
    again.load_state_dict(losses.state_dict())
    assert again.take_accuracy() == losses.take_accuracy() == 6 / 11
    assert math.isnan(losses.take_accuracy())
    earlier = again.state_dict()
    del earlier["answers"]  # as an earlier version saved it, in mid-epoch
    again.load_state_dict(earlier)
    again.add(torch.tensor(1.0), torch.arange(4), [torch.tensor([4, 4])])
    again.read(World(), 4)
    assert math.isnan(again.take_accuracy()) and math.isnan(again.take_accuracy())


def test_right_answers_of_a_step_that_is_left_out_do_not_count():
    losses = Losses()
    losses.add(torch.tensor(1.0), torch.arange(4), [torch.tensor([1, 4])])
    losses.add(torch.tensor(math.nan), torch.arange(4), [torch.tensor([4, 4])])
    with pytest.raises(DivergedError):
        losses.read(World(), 2)
    assert losses.take_accuracy() == 0.25


def test_the_step_whose_loss_is_not_finite_is_named():
    losses = Losses()
    _add(losses, 1.0, 2.0, float("nan"), 3.0)
    with pytest.raises(DivergedError, match=r"the loss became nan at step 13") as error:
        losses.read(World(), 14)
    assert error.value.bad_step.number == 13
    assert error.value.bad_step.samples == [0, 1, 2]
    assert losses.take_line() == 1.5  # those before it


def test_a_spike_is_a_multiple_of_the_median_of_recent_losses():
    losses = Losses(spike_factor=3.0)
    _add(losses, 50.0, *[1.0] * 18)  # of so few none is a spike
    losses.read(World(), 19)
    _add(losses, 40.0)
    losses.read(World(), 20)
    _add(losses, 2.9, 3.1)
    with pytest.raises(DivergedError, match=r"rose to 3.1, 3.1 times the median of the 21 steps before, at step 22"):
        losses.read(World(), 22)
    again = Losses(spike_factor=3.0)
    again.load_state_dict(losses.state_dict())
    _add(again, 3.1)
    with pytest.raises(DivergedError, match="at step 22"):
        again.read(World(), 22)
    without = Losses()
    without.load_state_dict(losses.state_dict())
    _add(without, 3.1)
    without.read(World(), 22)


def test_where_nearly_all_is_learnt_a_small_loss_is_no_spike():
    losses = Losses(spike_factor=3.0)
    _add(losses, *[0.0] * 30, 1e-3)
    losses.read(World(), 31)
    _add(losses, 4e-3)
    with pytest.raises(DivergedError, match="at step 32"):
        losses.read(World(), 32)


def test_status():
    state = State(Losses())
    assert state.status(0.9, 3) is None
    state.evaluations += [
        {"epoch": 1, "elapsed_s": 10.0, "accuracy": 0.91, "loss": 1.0},
        {"epoch": 2, "elapsed_s": 20.0, "accuracy": 0.90, "loss": 1.0},
    ]
    assert state.status(0.9, 3) == "target_reached"
    assert (state.time_to(0.9), state.time_to(0.95), state.best_accuracy, state.accuracy) == (10.0, None, 0.91, 0.90)
    state.epoch = 3
    assert (state.status(0.95, 3), state.status(None, 3)) == ("target_missed", "completed")
