"""Layers are assigned to ranks by the work of a step, to which an inverse counts as often as it is computed."""

from trainer.kfac.assignment import Cost, Grid, assign_layers

COSTS = {"large": Cost(1000, 1), "a": Cost(0, 3), "b": Cost(0, 3), "c": Cost(0, 3)}


def columns(inv_update_steps, grid):
    return {name: place.column for name, place in assign_layers(COSTS, grid, inv_update_steps).items()}


def test_a_seldom_computed_inverse_counts_little():
    of_layer = columns(1000, Grid(1, 2))  # 2 for the large layer, and 3 for each other one
    assert sorted(list(of_layer.values()).count(column) for column in range(2)) == [2, 2]


def test_an_inverse_in_each_step_has_a_rank_of_its_own():
    of_layer = columns(1, Grid(1, 2))
    assert list(of_layer.values()).count(of_layer["large"]) == 1
