"""What a node keeps is what it needs soonest: no way to evict has fewer misses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datapipe.sampling.block_order import NEVER, BlockOrder, Grid
from datapipe.sampling.cached_blocks import FREE, NextUses, choose_slot


def orders(num_blocks: int, size: int, lanes: int, world_size: int = 1, seed: int = 0):
    blocks = Grid(np.arange(num_blocks * size), np.arange(0, num_blocks * size + 1, size))
    return lambda epoch: BlockOrder(blocks, lanes * world_size, "pad", lanes * world_size, seed, epoch)


def sequence(turns: np.ndarray) -> list[int]:
    return np.argsort(turns, kind="stable")[: np.count_nonzero(turns < NEVER)].tolist()


def count_misses(turns: list[np.ndarray], num_slots: int) -> int:
    """Read all blocks in their turns; return how many reads found nothing."""
    tags, misses = np.full(num_slots, FREE), 0
    for epoch in range(len(turns) - 1):
        uses = NextUses(turns.__getitem__, epoch, len(turns) - 1 - epoch)
        for block in sequence(turns[epoch]):
            if (tags == block).any():
                continue
            misses += 1
            slot = choose_slot(uses, block, tags)
            if slot is not None:
                tags[slot] = block
    return misses


def fewest_misses(turns: list[np.ndarray], num_slots: int) -> int:
    """The same, by trying all ways to evict."""
    states = {frozenset(): 0}  # what is kept -> misses until then
    for block in [block for epoch in turns[:-1] for block in sequence(epoch)]:
        after: dict[frozenset, int] = {}
        for kept, misses in states.items():
            ways = [kept]
            if block not in kept:
                both = sorted(kept | {block})
                ways, misses = [*map(frozenset, itertools.combinations(both, min(len(both), num_slots)))], misses + 1
            for way in ways:
                after[way] = min(after.get(way, misses), misses)
        states = after
    return min(states.values())


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 2))
@example(seed=450, num_slots=2, nodes=2)
def test_no_way_to_evict_has_fewer_misses(seed, num_slots, nodes):
    order = orders(num_blocks=6, size=4, lanes=1, world_size=nodes, seed=seed)
    turns = [order(epoch).turns(range(1), nodes) for epoch in range(4)]
    turns.append(np.full(6, NEVER))  # behind the last epoch that is counted, nothing is needed
    assert count_misses(turns, num_slots) == fewest_misses(turns, num_slots)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_turns_are_those_in_which_ranks_read(world_size):
    """Each rank reads all blocks of its samples, in the order in which it needs them; a node those of its ranks."""
    order = orders(num_blocks=40, size=8, lanes=2, world_size=world_size)(3)
    batch = 2 * world_size
    samples, _ = order.at(np.arange(len(order)))
    steps, ranks = np.arange(len(order)) // batch, np.arange(len(order)) % batch // 2
    for rank in range(world_size):
        turns = order.turns(range(rank, rank + 1), world_size)
        mine = ranks == rank
        assert set(sequence(turns)) == set((samples[mine] // 8).tolist())
        # A window may be read before all of its blocks have a turn; behind it comes nothing that is needed earlier.
        first = [steps[mine & (samples // 8 == block)].min() for block in sequence(turns)]
        assert all(later >= earlier - 8 * 32 for earlier, later in itertools.pairwise(first))
    assert sorted(order.turns(range(world_size), world_size).tolist()) == list(range(40))


def test_a_run_is_a_part_of_its_block():
    order = orders(num_blocks=7, size=4, lanes=4)(0)
    _, runs = order.at(np.arange(len(order)))
    for run in np.unique(runs).tolist():
        block, samples = order.block_of(run)
        assert samples.tolist() == list(range(4 * block, 4 * block + 4))
        assert set(order.samples_of(run).tolist()) <= set(samples.tolist())
