"""The progress of a run: its mean loss, and how it ends."""

import pytest
import torch

from trainer.distributed import World
from trainer.errors import TrainingError
from trainer.state import MeanLoss, State

CPU = torch.device("cpu")


def test_mean_loss():
    loss = MeanLoss(CPU)
    for value in (1.0, 2.0, 6.0):
        loss.add(torch.tensor(value))
        loss.read(World(), 1)
    assert loss.take_line() == 3.0
    loss.add(torch.tensor(11.0))
    loss.read(World(), 4)
    assert (loss.take_line(), loss.take_epoch()) == (11.0, 5.0)
    loss.add(torch.tensor(float("nan")))
    with pytest.raises(TrainingError, match=r"loss became nan.*step 5"):
        loss.read(World(), 5)


def test_status():
    state = State(MeanLoss(CPU))
    assert state.status(0.9, 3) is None
    state.evaluations += [
        {"epoch": 1, "elapsed_s": 10.0, "accuracy": 0.91, "loss": 1.0},
        {"epoch": 2, "elapsed_s": 20.0, "accuracy": 0.90, "loss": 1.0},
    ]
    assert state.status(0.9, 3) == "target_reached"
    assert (state.time_to(0.9), state.time_to(0.95), state.best_accuracy, state.accuracy) == (10.0, None, 0.91, 0.90)
    state.epoch = 3
    assert (state.status(0.95, 3), state.status(None, 3)) == ("target_missed", "completed")
