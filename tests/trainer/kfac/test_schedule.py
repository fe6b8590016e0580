"""Which layers are updated in a step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.trainer.kfac.networks import run
from trainer.kfac import KFAC
from trainer.kfac.curvature_block import NORM_BYTES, OPERATIONS_PER_BYTE, ROW_BYTES, layer_cost
from trainer.kfac.schedule import StaggeredSchedule, period_of_step
from trainer.models import build


def test_layers_take_turns():
    """Each factor once in ten steps and each solution once in twenty, at first in shorter periods, and no step does
    more than its share.
    """
    torch.manual_seed(0)
    model = build("resnet8", num_classes=5, in_channels=3)
    preconditioner = KFAC(model, factor_update_steps=10, inv_update_steps=20)
    updates, inverses = [], []
    names = list(preconditioner.layers())
    matrices = [name for name in names if len(preconditioner.factors(name)) == 2]
    run(model, preconditioner, 1)
    for number in range(1, 61):
        weights = {name: preconditioner.blocks[name].averages["a"].weight.item() for name in matrices}
        states = {name: preconditioner.blocks[name].solution for name in matrices}
        run(model, preconditioner, 1, first=number)
        updates.append({n for n in matrices if preconditioner.blocks[n].averages["a"].weight.item() != weights[n]})
        inverses.append({n for n in matrices if preconditioner.blocks[n].solution is not states[n]})
    update_costs = {name: preconditioner.blocks[name].factor_cost() for name in matrices}
    inverse_costs = {name: layer_cost(preconditioner.blocks[name].layer).inverse for name in matrices}
    of_work = (updates, update_costs, [1, 2, 4, 8, 10]), (inverses, inverse_costs, [1, 2, 4, 8, 16, 20])
    for done, costs, first in of_work:
        every = first[-1]
        for begin, end in itertools.pairwise([*first, *range(2 * every, 61, every)]):
            of_period = done[begin - 1 : end - 1]
            assert sorted(name for of_step in of_period for name in of_step) == sorted(matrices)
            most = max(sum(costs[name] for name in of_step) for of_step in of_period)
            assert most <= sum(costs.values()) / len(of_period) + max(costs.values())
    together = KFAC(build("resnet8", num_classes=5, in_channels=3), stagger=False)
    schedule = together._updates.factor_schedule
    of_steps = [{schedule.is_turn(name, step, 10) for name in together.layers()} for step in range(21)]
    assert [step for step, found in enumerate(of_steps) if found == {True}] == [0, 1, 2, 4, 8, 10, 20]
    assert all(len(found) == 1 for found in of_steps)


def test_a_layer_that_is_first_used_later_has_its_turn_later():
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    preconditioner = KFAC(model, factor_update_steps=3, inv_update_steps=3)
    found = []
    for step in range(9):
        model.zero_grad()
        x = torch.randn(6, 4)
        out = model[0](x) if step < 2 else model[0](x) + model[1](x)
        out.square().sum(1).mean().backward()
        preconditioner.step()
        found.append(set(preconditioner.cosines()))
    assert found[:2] == [{"0"}] * 2 and found[-1] == {"0", "1"}
    assert found.index({"0", "1"}) <= 4


def test_layers_used_in_turns_are_all_preconditioned():
    """Each of two heads is used in every other step."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)])
    preconditioner = KFAC(model, factor_update_steps=10, inv_update_steps=10)
    weights = []
    for step in range(100):
        model.zero_grad()
        model[1 + step % 2](model[0](torch.randn(6, 4))).square().sum(1).mean().backward()
        preconditioner.step()
        weights.append([preconditioner.blocks[name].averages["a"].weight.item() for name in ("1", "2")])
    late = [weights[step] for step in (40, 60, 80, 99)]
    assert all(a[head] < b[head] for a, b in itertools.pairwise(late) for head in (0, 1))


def test_costs_are_in_bytes():
    """An embedding costs no more than it has rows, and a norm what its kernels read and write."""
    blocks = KFAC(nn.Sequential(nn.Embedding(50_000, 4), nn.Linear(9, 4), nn.BatchNorm1d(4))).blocks
    for block in blocks.values():
        block.num_rows = 7
    of_matrix = {n: n * (ROW_BYTES + 2 * n / OPERATIONS_PER_BYTE) for n in (4, 10)}
    wanted = [7 * (ROW_BYTES + of_matrix[4]), 7 * (of_matrix[10] + of_matrix[4]), 7 * NORM_BYTES * 4]
    assert [block.factor_cost() for block in blocks.values()] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("every", "begins"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6]),
        (2, [0, 1, 2, 4, 6]),
        (3, [0, 1, 2, 3, 6]),
        (8, [0, 1, 2, 4, 8, 16, 24]),
        (10, [0, 1, 2, 4, 8, 10, 20, 30]),
    ],
)
def test_periods(every, begins):
    """They double at first, and none is longer than `every` steps."""
    steps = range(begins[-1] + 1)
    periods = [period_of_step(step, every) for step in steps]
    assert [step for step in steps if periods[step].begin == step] == begins
    for step, period in zip(steps, periods, strict=True):
        assert period.begin == max(begin for begin in begins if begin <= step)
        assert period.length == next((b - a for a, b in itertools.pairwise(begins) if a == period.begin), every)


# A layer for each step of a period, with costs that rise: the first by name costs least, and has the last turn.
COSTS = {"a": 1.0, "b": 2.0, "c": 3.0}
FALLING = {"a": 3.0, "b": 2.0, "c": 1.0}
ONE_GROUP = dict.fromkeys(COSTS, -1)


@pytest.mark.parametrize(
    ("step", "factors", "inverses"),
    [
        (0, "abc", "abc"),  # periods of one step
        (1, "abc", "abc"),
        (2, "abc", "abc"),
        (3, "a", "c"),  # the first of three steps: number 1, so turns are one later than by costs
        (4, "c", "a"),
        (5, "b", "b"),
        (6, "b", "b"),  # number 2
        (7, "a", "c"),
        (8, "c", "a"),
        (9, "c", "a"),  # number 3
        (10, "b", "b"),
        (11, "a", "c"),
    ],
)
def test_a_schedule(step, factors, inverses):
    for costs, names in ((COSTS, factors), (FALLING, inverses)):
        schedule = StaggeredSchedule(costs, ONE_GROUP)
        assert "".join(name for name in costs if schedule.is_turn(name, step, 3)) == names


@pytest.mark.parametrize("step", range(30))
def test_without_stagger_all_are_updated_together(step):
    schedule = StaggeredSchedule(COSTS, ONE_GROUP, stagger=False)
    assert {schedule.is_turn(name, step, 10) for name in COSTS} == {step in (0, 1, 2, 4, 8, 10, 20)}


@pytest.mark.parametrize(
    ("groups", "turns"),
    [
        ([-1] * 6, [[0], [1], [0], [1], [0], [1]]),  # of all layers: each has a step of its own
        ([0, 1] * 3, [[0, 1], [0, 1], [0, 1], [], [], []]),  # of each owner: the owners work in the same steps
    ],
    ids=["together", "by owner"],
)
def test_layers_take_turns_within_their_group(groups, turns):
    """Layers belong to two owners in turns."""
    names = [str(number) for number in range(len(groups))]
    schedule = StaggeredSchedule(dict.fromkeys(names, 1.0), dict(zip(names, groups, strict=True)))
    period = [[int(name) % 2 for name in names if schedule.is_turn(name, step, 6)] for step in range(36, 42)]
    assert period == turns
