"""The running averages of factors against the weighted mean that they are."""

import math

import pytest
import torch

from trainer.kfac.curvature_block import RunningAverage

DECAY = 0.8


@pytest.fixture
def average():
    return RunningAverage((2,), torch.float64, torch.device("cpu"))


def update(average, *values):
    new = torch.tensor(values, dtype=torch.float64)
    average.update(new, DECAY, new.isfinite().all())


def test_it_is_the_mean_of_all_values_weighted_by_their_age(average):
    values = [(1.0, 4.0), (2.0, -1.0), (7.0, 0.5)]
    for number, value in enumerate(values):
        update(average, *value)
        weights = [DECAY ** (number - age) for age in range(number + 1)]
        mean = [sum(w * v[i] for w, v in zip(weights, values, strict=False)) / sum(weights) for i in range(2)]
        assert average.value.tolist() == pytest.approx(mean)


def test_what_is_not_finite_is_counted_and_changes_nothing(average):
    update(average, 1.0, 2.0)
    update(average, math.nan, 3.0)
    update(average, math.inf, 3.0)
    assert average.value.tolist() == pytest.approx([1.0, 2.0])
    assert (average.weight.item(), average.skipped.item()) == (pytest.approx(1 - DECAY), 2)
