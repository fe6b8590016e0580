"""Who does what, when, and what it sends: pure functions, without tensors.

The same on every rank, since they depend on nothing but their arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple


def spread(costs: Mapping[str, float], num_bins: int) -> dict[str, int]:
    """Each job's bin: the largest first, each into what is then the emptiest bin (longest processing time; Graham
    1969: the fullest is at most 4/3 of the best possible). Of equal ones the first by name, and the lowest bin.
    """
    bins = [(0.0, number) for number in range(min(num_bins, len(costs)))]  # no job needs more
    found = {}
    for job in sorted(costs, key=lambda job: (-costs[job], job)):
        load, number = heapq.heappop(bins)
        found[job] = number
        heapq.heappush(bins, (load + costs[job], number))
    return found


class Grid(NamedTuple):
    """Ranks in rows of `num_columns`, which are neighbours. A layer belongs to a column: its ranks hold the solution,
    and each gives the preconditioned gradient to its row.
    """

    num_rows: int
    num_columns: int

    def row(self, rank: int) -> list[int]:
        first = rank // self.num_columns * self.num_columns
        return list(range(first, first + self.num_columns))

    def column(self, number: int) -> list[int]:
        return list(range(number, self.num_rows * self.num_columns, self.num_columns))


def grid(world_size: int, grad_worker_fraction: float) -> Grid:
    """`grad_worker_fraction` of the ranks precondition each layer: 1 / world_size (least memory) to 1 (no gradients
    sent); KAISA, Pauloski et al. 2021. Raises ValueError where that makes no equal groups.
    """
    workers = round(grad_worker_fraction * world_size)
    if workers < 1 or world_size % workers or abs(workers - grad_worker_fraction * world_size) > 1e-6:
        allowed = ", ".join(f"{n}/{world_size}" for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(
            f"grad_worker_fraction: {grad_worker_fraction!r} makes no equal groups of {world_size} ranks; allowed: "
            f"{allowed}"
        )
    return Grid(workers, world_size // workers)


class Cost(NamedTuple):
    """Floating-point operations of a layer."""

    refresh: float  # every inv_update_steps
    precondition: float  # every step


class Place(NamedTuple):
    """`owner`: the rank that averages a layer's factors and computes its solution; `column`: whose ranks use it."""

    owner: int
    column: int


def place(costs: Mapping[str, Cost], grid: Grid, inv_update_steps: int) -> dict[str, Place]:
    """Columns of equal work in a step, and in each column owners of equal work."""
    work = {name: cost.precondition + cost.refresh / inv_update_steps / grid.num_rows for name, cost in costs.items()}
    columns = spread(work, grid.num_columns)
    places = {}
    for column in range(grid.num_columns):
        of_column = {name: costs[name].refresh for name in costs if columns[name] == column}
        ranks = grid.column(column)
        places |= {name: Place(ranks[row], column) for name, row in spread(of_column, grid.num_rows).items()}
    return places
