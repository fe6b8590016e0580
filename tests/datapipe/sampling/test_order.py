"""The order: every sample once, equal steps, and the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import SettingError
from datapipe.sampling.order import (
    MAX_SORTED,
    KeyedPermutation,
    epoch_order,
    mix,
    num_steps,
    permutation,
    slice_positions,
    uniform,
)

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)
# permutation(10, seed, epoch) of (0, 0), (1, 0), (0, 1)
FROZEN = [
    [4, 9, 8, 7, 2, 6, 1, 5, 0, 3],
    [4, 9, 5, 7, 8, 1, 0, 2, 6, 3],
    [4, 1, 0, 2, 6, 7, 5, 8, 9, 3],
]
FROZEN_LARGE = [76275723, 79584918, 85509701, 81500288]  # of epoch_order(10**8, 3, 5): the first three, and the last


def ranks_order(num_samples, seed, epoch, batch_size, world_size, last):
    """What each rank sees at each step: list of steps of list of ranks of (samples, valid)."""
    order = permutation(num_samples, seed, epoch)
    steps = []
    for step in range(num_steps(num_samples, batch_size * world_size, last)):
        positions = [slice_positions(step, batch_size, rank, world_size) for rank in range(world_size)]
        steps.append([order[p[p < num_samples]] for p in positions])
    return steps


@given(st.integers(1, 500), seeds, epochs, st.integers(1, 9), st.sampled_from([1, 2, 3, 8]))
def test_padded_epoch_has_every_sample_once(num_samples, seed, epoch, batch_size, world_size):
    steps = ranks_order(num_samples, seed, epoch, batch_size, world_size, "pad")
    seen = np.concatenate([samples for step in steps for samples in step])
    assert sorted(seen) == list(range(num_samples))


@given(st.integers(1, 500), seeds, epochs, st.integers(1, 9), st.sampled_from([1, 2, 3, 8]))
def test_dropping_epoch_has_full_batches_of_distinct_samples(num_samples, seed, epoch, batch_size, world_size):
    if batch_size * world_size > num_samples:
        with pytest.raises(SettingError, match="larger than the data set"):
            num_steps(num_samples, batch_size * world_size, "drop")
        return
    steps = ranks_order(num_samples, seed, epoch, batch_size, world_size, "drop")
    seen = np.concatenate([samples for step in steps for samples in step])
    assert all(len(samples) == batch_size for step in steps for samples in step)
    assert len(set(seen)) == len(seen) == num_samples // (batch_size * world_size) * batch_size * world_size


@given(st.integers(24, 500), seeds, epochs, st.integers(1, 3), st.sampled_from(["drop", "pad"]))
def test_global_batches_are_the_same_for_any_world_size(num_samples, seed, epoch, eighths, last):
    global_batch = 24 * eighths
    if last == "drop" and global_batch > num_samples:
        return
    orders = [
        [np.concatenate(step).tolist() for step in
         ranks_order(num_samples, seed, epoch, global_batch // world_size, world_size, last)]
        for world_size in (1, 2, 3, 8)
    ]  # fmt: skip
    assert orders[0] == orders[1] == orders[2] == orders[3]


def test_permutation_is_frozen():
    """A resumed run must find the order of the run that it resumes: these numbers may never change."""
    assert permutation(10, 0, 0).tolist() == FROZEN[0]
    assert permutation(10, 1, 0).tolist() == FROZEN[1]
    assert permutation(10, 0, 1).tolist() == FROZEN[2]
    assert mix(np.array([1], np.uint64))[0] == 0x5692161D100B05E5  # SplitMix64's finaliser of 1


def test_permutations_are_uniform():
    """Each of the 24 orders of 4 samples is equally frequent: chi-squared with 23 degrees of freedom."""
    counts: dict[tuple, int] = {}
    for epoch in range(4800):
        key = tuple(permutation(4, 7, epoch))
        counts[key] = counts.get(key, 0) + 1
    statistic = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert len(counts) == 24
    assert statistic < 49.7  # exceeded by chance once in 1,000


def test_neighbours_do_not_stay_together():
    a, b = permutation(100_000, 0, 0), permutation(100_000, 0, 1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02


@given(st.integers(1, 3000), seeds, epochs)
def test_a_keyed_permutation_has_every_sample_once(num_samples, seed, epoch):
    order = KeyedPermutation(num_samples, seed, epoch)
    samples = order[np.arange(num_samples)]
    assert len(order) == num_samples and sorted(samples) == list(range(num_samples))
    some = np.arange(num_samples)[::-7]
    np.testing.assert_array_equal(order[some], samples[some])


def test_large_data_sets_have_an_order_without_an_array(monkeypatch):
    """And it is frozen: a resumed run must find the order of the run that it resumes."""
    np.testing.assert_array_equal(epoch_order(1000, 1, 2), permutation(1000, 1, 2))
    assert MAX_SORTED >= 14_197_122  # ImageNet-21k
    with monkeypatch.context() as patch:
        patch.setattr("datapipe.sampling.order.MAX_SORTED", 1000)
        assert isinstance(epoch_order(1000, 0, 0), np.ndarray)
        assert isinstance(epoch_order(1001, 0, 0), KeyedPermutation)
    order = epoch_order(10**8, 3, 5)
    assert order[np.array([0, 1, 2, 10**8 - 1])].tolist() == FROZEN_LARGE
    assert order[np.array([], np.int64)].tolist() == []


def test_a_keyed_permutation_cannot_be_told_from_chance():
    """Fixed points, neighbours, cycles of two, where samples go, and one epoch against the next."""
    count = 1_000_003
    places = np.arange(count)
    one, two = (KeyedPermutation(count, 0, epoch)[places] for epoch in (0, 1))
    for order in (one, two):
        assert (order == places).sum() < 12  # Poisson of mean 1
        assert (np.abs(np.diff(order)) == 1).sum() < 15  # of mean 2
        assert (order[order] == places).sum() < 15  # of mean 2
        grid = np.histogram2d(places, order, bins=40)[0]  # chi-squared with 39² degrees of freedom, 55 its deviation
        expected = count / 1600
        assert abs(((grid - expected) ** 2 / expected).sum() - 39**2) < 4 * 55
    assert (one == two).sum() < 12
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.005 and abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.005


@given(seeds, epochs, st.integers(1, 50))
def test_uniform_depends_on_the_position_alone(seed, epoch, draws):
    positions = np.arange(40)
    together = uniform(seed, epoch, 1, positions, draws)
    assert together.shape == (40, draws)
    assert ((together >= 0) & (together < 1)).all()
    np.testing.assert_array_equal(together[7:9], uniform(seed, epoch, 1, positions[7:9], draws))


def test_uniform_is_uniform_and_its_purposes_differ():
    draws = uniform(3, 5, 2, np.arange(20_000), 3)
    assert np.abs(np.histogram(draws, 10, (0, 1))[0] / draws.size - 0.1).max() < 0.005
    assert abs(np.corrcoef(draws.T)[np.triu_indices(3, 1)]).max() < 0.03
    assert abs(np.corrcoef(draws[:, 0], uniform(3, 5, 1, np.arange(20_000), 3)[:, 0])[0, 1]) < 0.03
