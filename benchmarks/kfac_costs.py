"""K-FAC's memory and traffic by formula, for a network on 1 to 1,024 ranks.

    python -m benchmarks.kfac_costs [--model resnet50] [--solver cholesky]

For P ranks, w of them to precondition a layer, with inputs n and outputs m of G groups, a rank keeps of each layer

    factors     G (n (n + 1) + m (m + 1)) / 2         if it is the owner
    solutions   G (n² + m² (+ n + m with "eigen"))    if it is in the layer's column

and gives to collectives, in the mean over ranks and steps (F and I: the two intervals),

    factors     (the same + 1) / F                    with P > 1, unless they are local
    solutions   their size (with "cholesky" as triangles) / (P I)    with w > 1
    gradients   (G m n + 2) w / P                     with w < P
    reduced     all parameters                        with `reduce_to_owners`, in place of DDP's all-reduce

A convolution's n includes the K elements of its kernel; with `spatially_uncorrelated`, its factors and solutions are
those of n / K. Elements have 4 bytes, those of a solution's matrices with `inv_dtype="bfloat16"` 2.
"""

from __future__ import annotations

import sys
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.measure import command_line, table
from trainer import models
from trainer.kfac.assignment import assign_layers, make_grid
from trainer.kfac.curvature_block import layer_cost
from trainer.kfac.norms import Norm
from trainer.kfac.registration import register_layers
from trainer.kfac.settings import KFACSettings
from trainer.kfac.solvers import SOLVERS
from trainer.kfac.symmetric import packed_shape

RANKS = (1, 8, 64, 1024)
MB = 1e6


class Costs(NamedTuple):
    """Bytes of memory, on the rank that keeps most, and bytes sent in a step, in the mean over ranks and steps."""

    factor_bytes: int
    solution_bytes: int
    factors_sent: float
    solutions_sent: float
    gradients_sent: float
    reduced: float


def costs(model: nn.Module, world_size: int, settings: KFACSettings, reduce_to_owners: bool = False) -> Costs:
    """Return what K-FAC keeps and sends with float32 factors.

    Args:
        model: Any module, also on the meta device.
        world_size: The number of ranks.
        settings: The settings of `KFAC`.
        reduce_to_owners: Whether `trainer.kfac.reduce_to_owners` is used.

    Raises:
        ValueError: `grad_worker_fraction` makes no equal groups of the ranks.
    """
    grid = make_grid(world_size, settings.grad_worker_fraction)
    layers = register_layers(model, spatially_uncorrelated=settings.spatially_uncorrelated)[0]
    norms = [layer.shapes()["unit"] for layer in layers.values() if isinstance(layer, Norm)]
    matrices = {name: layer for name, layer in layers.items() if not isinstance(layer, Norm)}
    layer_costs = {name: layer_cost(layer) for name, layer in matrices.items()}
    assignments = assign_layers(layer_costs, grid, settings.inv_update_steps)
    factors = [4 * sum(map(_packed_size, norms))] * world_size
    solutions, sent = [0] * world_size, {"factors": 0, "solutions": 0, "gradients": 0}
    for name, layer in matrices.items():
        shapes = layer.shapes()
        factor_size = sum(map(_packed_size, shapes.values()))
        solution_bytes, bytes_sent = _solution_bytes(shapes, settings)
        factors[assignments[name].owner] += 4 * factor_size
        for rank in grid.grad_workers(assignments[name].column):
            solutions[rank] += solution_bytes
        sent["factors"] += 0 if settings.local_factors else 4 * (1 + factor_size)
        sent["solutions"] += bytes_sent
        sent["gradients"] += 4 * (layer.num_elements() + 2)
    sent["factors"] += 4 * sum(1 + _packed_size(shape) for shape in norms)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Costs(
        factor_bytes=max(factors),
        solution_bytes=max(solutions),
        factors_sent=sent["factors"] / settings.factor_update_steps if world_size > 1 else 0.0,
        solutions_sent=sent["solutions"] / world_size / settings.inv_update_steps if grid.num_rows > 1 else 0.0,
        gradients_sent=sent["gradients"] * grid.num_rows / world_size if grid.num_columns > 1 else 0.0,
        reduced=4.0 * parameters if reduce_to_owners else 0.0,
    )


def _packed_size(shape: tuple[int, ...]) -> int:
    return prod(packed_shape(shape) if len(shape) == 3 else shape)


def _solution_bytes(shapes: dict[str, tuple[int, ...]], settings: KFACSettings) -> tuple[int, int]:
    """Return the bytes of a layer's solution that are kept, and those that are sent."""
    symmetric, element_bytes = SOLVERS[settings.solver].symmetric, 2 if settings.inv_dtype else 4
    matrices = [shape for shape in shapes.values() if len(shape) == 3]
    values = 4 * sum(prod(shape) for shape in shapes.values() if len(shape) == 2)
    if not symmetric:
        values += 4 * sum(groups * n for groups, n, _ in matrices)
    elements_sent = sum(map(_packed_size, matrices)) if symmetric else sum(map(prod, matrices))
    return values + element_bytes * sum(map(prod, matrices)), values + element_bytes * elements_sent


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--solver", default="cholesky", help="(default: %(default)s)")
    arguments = parser.parse_args()
    with torch.device("meta"):
        network = models.build(arguments.model, num_classes=1000, in_channels=3)
    rows = []
    for ranks in RANKS:
        for fraction in sorted({1.0, 0.5 if ranks > 1 else 1.0, 1 / ranks}, reverse=True):
            of_one = ("local_factors", "reduce_to_owners") if fraction == 1 / ranks and ranks > 1 else ()
            for option in (None, *of_one):
                settings = KFACSettings(
                    grad_worker_fraction=fraction, solver=arguments.solver, local_factors=option == "local_factors"
                )
                figures = costs(network, ranks, settings, reduce_to_owners=option == "reduce_to_owners")
                share = f"{round(fraction * ranks)}/{ranks}" + (f", {option}" if option else "")
                rows.append([share, *(f"{value / MB:,.1f}" for value in figures)])
    gradients = sum(parameter.numel() for parameter in network.parameters()) * 4 / MB
    header = ["workers a layer", "factors", "solutions", *(f"{what} sent" for what in ("factors", "solutions",
              "gradients")), "gradients reduced"]  # fmt: skip
    print(table(header, rows))
    print(f"MB a rank (kept: of the rank with most; sent: a step, in the mean); DDP's gradients: {gradients:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
