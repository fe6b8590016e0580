"""The running averages of factors against the weighted mean that they are."""

import math

import pytest
import torch

from trainer.kfac.running_average import RunningAverage, update_averages

DECAY = 0.8


@pytest.fixture
def average():
    return RunningAverage((2,), torch.float64, torch.device("cpu"))


def update(average, *values):
    update_averages([[(average, torch.tensor(values, dtype=torch.float64))]], DECAY)


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


def test_the_factors_of_a_layer_are_skipped_together():
    """Layers with one factor and with two, and of two types, enter the same update."""
    shapes = [(2, torch.float32), (2, torch.float32), (1, torch.float32), (2, torch.float64)]
    layers = [[RunningAverage((2,), dtype, torch.device("cpu")) for _ in range(n)] for n, dtype in shapes]
    update_averages([[(each, torch.ones(2).to(each.value)) for each in layer] for layer in layers], DECAY)
    new = [[torch.full((2,), 3.0).to(each.value) for each in layer] for layer in layers]
    new[1][1][0] = math.nan
    update_averages([list(zip(*pair, strict=True)) for pair in zip(layers, new, strict=True)], DECAY)
    mean = (DECAY + 3) / (DECAY + 1)
    for number, layer in enumerate(layers):
        for average in layer:
            assert average.value.tolist() == pytest.approx([1, 1] if number == 1 else [mean, mean])
            assert average.skipped.item() == (number == 1)
