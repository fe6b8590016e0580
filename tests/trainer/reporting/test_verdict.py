"""What bounds a run, and that the advice names what the figures say, and nothing that is done already."""

import pytest

from trainer.reporting.trace import ROWS
from trainer.reporting.verdict import Figures, advise, find_bound


def figures(compute=1.0, data=0.0, communication=0.0, host=0.0, **changes):
    shares = dict(zip(ROWS, (data, host, compute, communication), strict=True))
    values = {
        "shares": shares, "step_s": 0.1, "images_per_s": 2560.0, "memory_share": 0.6, "device": "cpu", "world_size": 2,
        "batch_size": 128, "precision": "bf16", "channels_last": True, "is_compiled": True, "threads": 4, "cores": 4,
        "loader_threads": 4, "backend": "cpu", "is_staged": True,
    }  # fmt: skip
    return Figures(**values | changes)


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ({"compute": 0.92, "data": 0.04, "host": 0.04}, "compute"),
        ({"compute": 0.7, "data": 0.2, "host": 0.1}, "data"),
        ({"compute": 0.5, "data": 0.1, "communication": 0.15, "host": 0.25}, "host"),
        ({"compute": 0.5, "data": 0.1, "communication": 0.3, "host": 0.1}, "communication"),
    ],
)
def test_the_largest_share_that_can_be_saved_is_named_with_its_number(shares, bound):
    some = figures(**shares)
    assert find_bound(some) == bound
    first = advise(some)[0]
    assert f"{some.shares[bound]:.0%} of each step of 100.0 ms" in first


@pytest.mark.parametrize(
    ("shares", "changes", "says"),
    [
        ({}, {"precision": "off"}, "train.precision = 'bf16'"),
        ({}, {"channels_last": False}, "train.channels_last"),
        ({}, {"is_compiled": False}, "train.compile"),
        ({}, {"threads": 1}, "OMP_NUM_THREADS: 1 of 4 cores"),
        ({}, {"device": "cuda", "memory_share": 0.2}, "train.batch_size: 20% of the memory"),
        ({}, {"memory_share": 0.95}, "memory: 95%"),
        ({"data": 0.5, "compute": 0.5}, {"loader_threads": 1}, "data.threads: 1 of 4 cores"),
        ({"data": 0.5, "compute": 0.5}, {"device": "cuda"}, "'dali'"),
        ({"data": 0.5, "compute": 0.5}, {"is_staged": False}, "--stage"),
        ({"host": 0.5, "compute": 0.5}, {"is_compiled": False}, "train.compile"),
        ({"host": 0.5, "compute": 0.5}, {}, "train.batch_size: 128 images per rank"),
        ({"communication": 0.5, "compute": 0.5}, {}, "train.batch_size: 256 on 2 ranks"),
    ],
)
def test_advice_is_given_where_it_applies(shares, changes, says):
    assert any(says in line for line in advise(figures(**shares, **changes)))
    if changes:
        assert not any(says in line for line in advise(figures(**shares)))
