"""Ranks that do not have the same before them are told so, and who has what."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from datapipe import native
from datapipe.loaders.native_pixels import choose_native
from trainer.config.recipe import load_recipe
from trainer.errors import TrainingError
from trainer.ranks import consistency
from trainer.ranks.consistency import check_replicas, check_setup, check_start
from trainer.ranks.world import World


@pytest.fixture
def others(monkeypatch):
    """others(change, …): the ranks after the first have what `change` makes of the first one's, or None the same."""

    def _others(*changes) -> World:
        def gather(world, mine):
            return [mine, *(mine if change is None else change(copy.deepcopy(mine)) for change in changes)]

        monkeypatch.setattr(consistency, "gather_everywhere", gather)
        count = 1 + len(changes)
        return World(world_size=count, host_of=tuple(f"node{rank}" for rank in range(count)))

    return _others


def test_other_versions_of_the_software_are_refused(others, recipe_file):
    recipe = load_recipe(str(recipe_file), [])
    check_setup(others(None, None), recipe, {"train": "1"})

    ours = "none" if choose_native().native is None else f"version {native.VERSION}"
    for name, older, own in (("torch", "1.0", torch.__version__), ("decoder in C", "version 0", ours)):

        def with_older(setup, name=name, older=older):
            return setup | {"versions": setup["versions"] | {name: older}}

        words = f"rank 2 (node2) has other versions than rank 0 (node0): {name} {older}, not {own}"
        with pytest.raises(TrainingError, match=f"^{re.escape(words)}"):
            check_setup(others(None, with_older), recipe, {"train": "1"})


def test_ranks_that_begin_with_other_parameters_are_refused(others):
    module = nn.BatchNorm1d(2)
    digest = consistency.parameter_digest(module)
    check_start(others(None), module)
    module.running_mean[1] += 1
    other = consistency.parameter_digest(module)
    assert other != digest
    with pytest.raises(TrainingError, match=r"^rank 1 \(node1\) has another initial parameters than rank 0"):
        check_start(others(lambda start: start | {"initial parameters": digest}), module)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [((1,), (0, 1)), ((None, 1), (2,)), ((1, None, None), (1,)), ((1, 1, None), (0, 1, 2, 3))],
    ids=["one of two", "one of three", "one of four", "two of four"],
)
def test_parameters_that_drift_apart_are_noticed(others, wrong, named):
    """Unless most ranks have the same, it is not known which of them are right."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def drifted(sums):
        return [*sums[:2], sums[2] + 1, sums[3]]

    check_replicas(others(*[None] * len(wrong)), module, 7)
    who = ", ".join(rf"rank {rank} \(node{rank}\)" for rank in named)
    with pytest.raises(TrainingError, match=rf"^{who}: other parameters .* after step 7, first in 1\.weight\."):
        check_replicas(others(*(drifted if rank else None for rank in wrong)), module, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_bit_of_a_parameter_counts(dtype):
    weights = torch.randn(3, 2).to(dtype).t()
    before = consistency._sum_bits(weights)
    for bit in (0, 8 * dtype.itemsize - 1):
        flipped = weights.clone(memory_format=torch.contiguous_format)
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        flipped.view(whole)[1, 2] ^= torch.tensor(1, dtype=whole) << bit
        assert consistency._sum_bits(flipped) != before
