"""What K-FAC keeps and sends, by formula: for any number of ranks, without any.

For P ranks, w of them to precondition a layer, with inputs n and outputs m of G groups, a rank keeps of each layer

    factors     G (n (n + 1) + m (m + 1)) / 2         if it is the owner
    solutions   G (n² + m² (+ n + m with "eigen"))    if it is in the layer's column

and gives to collectives, in the mean over ranks and steps (F and I: the two intervals),

    factors     (the same + 1) / F                    with P > 1, unless they are local
    solutions   their size (with "cholesky" as triangles) / (P I)    with w > 1
    gradients   (G m n + 2) w / P                     with w < P
    reduced     all parameters                        with `reduce_to_owners`, in place of DDP's all-reduce

A convolution's n includes its K taps; spatially uncorrelated, its factors and solutions are those of n / K. Elements
have 4 bytes, those of a solution's matrices with `inv_dtype="bfloat16"` 2.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch import nn

from .assignment import grid, place
from .curvature_block import cost
from .layers import Norm
from .registration import find
from .settings import KFACSettings
from .solvers import SOLVERS
from .symmetric import folded_shape


class Costs(NamedTuple):
    factor_bytes: int  # of the rank that keeps most
    solution_bytes: int
    factors_sent: float  # bytes a step, in the mean over the ranks
    solutions_sent: float
    gradients_sent: float
    reduced: float


def costs(
    model: nn.Module,
    world_size: int,
    grad_worker_fraction: float = 1.0,
    factor_update_steps: int = 10,
    inv_update_steps: int = 100,
    solver: str = "eigen",
    local_factors: bool = False,
    spatially_uncorrelated: bool = False,
    inv_dtype: str | None = None,
    reduce_to_owners: bool = False,
) -> Costs:
    """Of float32 factors, for `world_size` ranks; the other settings are those of `KFAC`. `model` may be on the meta
    device. Raises ValueError like `KFAC`.
    """
    KFACSettings(
        factor_update_steps=factor_update_steps, inv_update_steps=inv_update_steps, solver=solver, inv_dtype=inv_dtype
    )
    ranks = grid(world_size, grad_worker_fraction)
    layers = find(model, spatially_uncorrelated=spatially_uncorrelated)[0]
    norms = [layer.shapes()["unit"] for layer in layers.values() if isinstance(layer, Norm)]
    matrices = {name: layer for name, layer in layers.items() if not isinstance(layer, Norm)}
    places = place({name: cost(layer) for name, layer in matrices.items()}, ranks, inv_update_steps)
    factors = [4 * sum(map(_folded, norms))] * world_size
    solutions, sent = [0] * world_size, {"factors": 0, "solutions": 0, "gradients": 0}
    for name, layer in matrices.items():
        of = layer.shapes()
        kept, flat = _solution(of, SOLVERS[solver].symmetric, 2 if inv_dtype else 4)
        factors[places[name].owner] += 4 * sum(map(_folded, of.values()))
        for rank in ranks.column(places[name].column):
            solutions[rank] += kept
        sent["factors"] += 0 if local_factors else 4 * (1 + sum(map(_folded, of.values())))
        sent["solutions"] += flat
        sent["gradients"] += 4 * (layer.num_elements() + 2)
    sent["factors"] += 4 * sum(1 + _folded(shape) for shape in norms)
    return Costs(
        max(factors),
        max(solutions),
        sent["factors"] / factor_update_steps if world_size > 1 else 0.0,
        sent["solutions"] / world_size / inv_update_steps if ranks.num_rows > 1 else 0.0,
        sent["gradients"] * ranks.num_rows / world_size if ranks.num_columns > 1 else 0.0,
        4.0 * sum(of.numel() for of in model.parameters() if of.requires_grad) if reduce_to_owners else 0.0,
    )


def _folded(shape: tuple[int, ...]) -> int:
    return prod(folded_shape(shape) if len(shape) == 3 else shape)


def _solution(shapes: dict[str, tuple[int, ...]], symmetric: bool, element_bytes: int) -> tuple[int, int]:
    """Bytes that are kept and that are sent; `element_bytes`: of a matrix."""
    matrices = [shape for shape in shapes.values() if len(shape) == 3]
    values = 4 * sum(prod(shape) for shape in shapes.values() if len(shape) == 2)
    if not symmetric:
        values += 4 * sum(groups * n for groups, n, _ in matrices)
    sent = sum(map(_folded, matrices)) if symmetric else sum(map(prod, matrices))
    return values + element_bytes * sum(map(prod, matrices)), values + element_bytes * sent
