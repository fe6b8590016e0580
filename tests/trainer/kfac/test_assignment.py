"""Who does what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.kfac.assignment import Cost, assign_layers, make_grid, spread


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=30), st.integers(1, 12))
def test_the_fullest_bin_is_near_the_best_possible(costs, num_bins):
    found = spread(costs, num_bins)
    assert found.keys() == costs.keys() and set(found.values()) <= set(range(num_bins))
    loads = [sum(costs[job] for job in costs if found[job] == number) for number in range(num_bins)]
    largest = max(costs.values(), default=0.0)  # the job that ends last began in what was then the emptiest bin
    assert max(loads) <= sum(costs.values()) / num_bins + (1 - 1 / num_bins) * largest + 1e-3
    assert spread(dict(reversed(costs.items())), num_bins) == found


def test_jobs_are_spread_evenly():
    assert spread({"a": 4, "b": 3, "c": 3, "d": 0}, 10**12) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert spread({"a": 4, "b": 3, "c": 3, "d": 2}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


@pytest.mark.parametrize(
    ("world_size", "fraction", "shape"),
    [(1, 1.0, (1, 1)), (4, 1.0, (4, 1)), (4, 0.5, (2, 2)), (4, 0.25, (1, 4)), (6, 1 / 3, (2, 3)),
     (96, 1 / 48, (2, 48))],
)  # fmt: skip
def test_grids(world_size, fraction, shape):
    found = make_grid(world_size, fraction)
    assert found == shape
    columns = [found.grad_workers(number) for number in range(found.num_columns)]
    assert sorted(rank for column in columns for rank in column) == list(range(world_size))
    for rank in range(world_size):
        assert rank in found.grad_receivers(rank) and len(found.grad_receivers(rank)) == found.num_columns
        assert all(len(set(found.grad_receivers(rank)) & set(column)) == 1 for column in columns)


@pytest.mark.parametrize(("world_size", "fraction"), [(4, 0.3), (4, 0.75), (3, 0.5), (1, 0.5)])
def test_fractions_that_make_no_equal_groups_are_refused(world_size, fraction):
    with pytest.raises(ValueError, match=f"grad_worker_fraction: {fraction} .* of {world_size} ranks; allowed: 1/"):
        make_grid(world_size, fraction)


def test_owners_are_in_their_column_and_share_the_work():
    costs = {f"layer{i}": Cost(float(i**3), float(i**2)) for i in range(1, 20)}
    for fraction in (1.0, 0.5, 0.25):
        of = make_grid(4, fraction)
        places = assign_layers(costs, of, 10)
        assert all(owner in of.grad_workers(column) for owner, column in places.values())
        assert {owner for owner, _ in places.values()} == {0, 1, 2, 3}
