"""Which rank does what: pure functions, without tensors.

All ranks compute the same answer, as it depends on nothing except the arguments.

The grid of KAISA (Pauloski et al. 2021), for 6 ranks of which 2 precondition each layer:

                    column 0   column 1   column 2
    row 0           rank 0     rank 1     rank 2       a row: the gradient receivers of its ranks
    row 1           rank 3     rank 4     rank 5
                    a column: the gradient workers of its layers

A layer belongs to a column. One of its gradient workers is the layer's owner (KAISA's inverse worker): it averages the
factors, computes the solution and sends it down the column. Each gradient worker then preconditions the gradient and
sends it along its row.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple


def spread(costs: Mapping[str, float], num_bins: int) -> dict[str, int]:
    """Return a bin for each job, such that bins are about equally full.

    The largest job comes first, and each goes into the bin that is then the emptiest (longest processing time; Graham
    1969: the fullest is at most 4/3 of the best possible). Ties go to the first name and the lowest bin.
    """
    bins = [(0.0, number) for number in range(min(num_bins, len(costs)))]  # more bins than jobs would stay empty
    bin_of_job = {}
    for job in sorted(costs, key=lambda job: (-costs[job], job)):
        load, number = heapq.heappop(bins)
        bin_of_job[job] = number
        heapq.heappush(bins, (load + costs[job], number))
    return bin_of_job


class Grid(NamedTuple):
    """The ranks in rows of `num_columns` neighbours; `num_rows` ranks precondition each layer."""

    num_rows: int
    num_columns: int

    def grad_receivers(self, rank: int) -> list[int]:
        """Return the row of a rank: those that get preconditioned gradients from each other."""
        first = rank // self.num_columns * self.num_columns
        return list(range(first, first + self.num_columns))

    def grad_workers(self, column: int) -> list[int]:
        """Return the ranks of a column: those that have the solutions of its layers."""
        return list(range(column, self.num_rows * self.num_columns, self.num_columns))


def make_grid(world_size: int, grad_worker_fraction: float) -> Grid:
    """Return the grid in which `grad_worker_fraction` of the ranks precondition each layer.

    The fraction is from 1 / world_size (least memory) to 1 (no gradients are sent).

    Raises:
        ValueError: The fraction makes no equal groups of the ranks.
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
    """Floating-point operations of a layer, up to a common factor."""

    inverse: float  # every inv_update_steps
    precondition: float  # every step


class Assignment(NamedTuple):
    """A layer's place in the grid: the column of its gradient workers, and which of them is its owner."""

    owner: int
    column: int


def assign_layers(costs: Mapping[str, Cost], grid: Grid, inv_update_steps: int) -> dict[str, Assignment]:
    """Assign layers such that columns, and in each column the owners, have equal work.

    Args:
        costs: The cost of each layer, by name.
        grid: The ranks.
        inv_update_steps: The number of steps between two inverses of a layer, over which that work is averaged.

    Returns:
        The assignment of each layer, by name.
    """
    work = {name: cost.precondition + cost.inverse / inv_update_steps / grid.num_rows for name, cost in costs.items()}
    columns = spread(work, grid.num_columns)
    assignments: dict[str, Assignment] = {}
    for column in range(grid.num_columns):
        inverse_costs = {name: costs[name].inverse for name in costs if columns[name] == column}
        ranks = grid.grad_workers(column)
        rows = spread(inverse_costs, grid.num_rows)
        assignments |= {name: Assignment(ranks[row], column) for name, row in rows.items()}
    return assignments
