"""A layer's block of the curvature: averages of its factors, and its solution, as far as this rank has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .assignment import Assignment, Cost
from .communication import Message
from .hooks import StatisticsHook
from .layers import Layer
from .norms import Norm
from .running_average import RunningAverage
from .settings import KFACSettings
from .solvers import Solution, Solver
from .symmetric import pack_triangle, packed_shape, unpack_triangle

SYMMETRIC = "a", "g", "unit"  # factors; EKFAC's "scale" is not
# What the schedule balances: it need not be exact, and must be the same on all ranks.
NORM_BYTES = 18  # that the kernels of Norm.sums read and write for each element of a half-precision input
ROW_BYTES = 4  # the same of factors.outer_products, which reads each half-precision element twice
OPERATIONS_PER_BYTE = 295  # of an H100: 989e12 a second in half precision, and 3.35e12 bytes


class CurvatureBlock:
    """A layer's running averages, on its owner, and its solution, on the ranks of its column.

    A norm's block is small: every rank owns it, and it needs no solution. Symmetric factors are kept as packed
    triangles (see symmetric.py).

    Attributes:
        averages: The factors, by name; empty if this rank is not the owner.
        new: The factors of this step.
        solution: The inverse or eigen-decomposition; empty if this rank is not of the layer's column.
        num_rows: Rows in the first batch, the same on all ranks, as the schedule depends on it.
        has_factors: Whether any rank has ever used the layer.
        has_solution: Whether a solution has been due, on any rank.
    """

    def __init__(self, layer: Layer, assignment: Assignment, rank: int, solver: Solver, settings: KFACSettings) -> None:
        """Make the block of a layer that has not been used yet.

        Args:
            layer: The layer, whose module gets a hook that sums statistics.
            assignment: The layer's owner and column; any, for a norm.
            rank: This process's rank.
            solver: Solver of the solution.
            settings: Settings as they are now; those that may change come with each call.
        """
        self.layer, self.assignment, self.solver = layer, assignment, solver
        self.hook = StatisticsHook(layer, settings)
        weight = self.layer.weight
        self.device, self.dtype = weight.device, torch.promote_types(weight.dtype, torch.float32)
        self._matrix_dtype: torch.dtype = getattr(torch, settings.inv_dtype) if settings.inv_dtype else self.dtype
        self.is_norm = isinstance(self.layer, Norm)
        self.is_owner = self.is_norm or assignment.owner == rank
        shapes = self.shapes() if self.is_owner else {}
        self.averages = {name: RunningAverage(shape, self.dtype, self.device) for name, shape in shapes.items()}
        self.new: dict[str, Tensor] = {}
        self.solution: Solution = {}
        self.num_rows = 0
        self.has_factors = self.has_solution = False
        self.num_updates = {"factors": 0, "solution": 0}  # by this rank

    # --- factors ---

    def begin_update(self) -> None:
        """Take the factors of this step from the hook, if it has any."""
        new = self.hook.take_factors() if self.hook.num_samples else {}
        self.new = {name: pack_triangle(factor) if self._is_packed(name) else factor for name, factor in new.items()}
        self.num_rows = self.num_rows or self.hook.num_rows
        self.hook.clear()

    def factor_messages(self) -> list[Message]:
        """Return the factors of this step, to be averaged in place over the ranks; of zeros if this rank has none."""
        if not self.new:
            shapes = self.shapes().items()
            self.new = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name, shape in shapes}
        return [Message(factor) for factor in self.new.values()]

    def end_update(self) -> list[tuple[RunningAverage, Tensor]]:
        """Return the averages that get a value in this step, and the values, for `update_averages`."""
        updates = []
        if self.num_rows:  # a rank has used the layer
            updates = [(average, self.new[name]) for name, average in self.averages.items() if name in self.new]
            self.has_factors = True
            self.num_updates["factors"] += bool(updates)
        self.new = {}
        return updates

    def discard(self) -> None:
        """Forget the statistics since the last step."""
        self.new = {}
        self.num_rows = self.num_rows if self.has_factors else 0
        self.hook.clear()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes in which factors are kept and sent."""
        shapes = self.layer.shapes()
        return {name: packed_shape(shape) if self._is_packed(name) else shape for name, shape in shapes.items()}

    def factor(self, name: str) -> Tensor:
        """Return a running average, unpacked."""
        value = self.averages[name].value
        return unpack_triangle(value, self.layer.shapes()[name][-1]) if self._is_packed(name) else value

    def _is_packed(self, name: str) -> bool:
        return name in SYMMETRIC and len(self.layer.shapes()[name]) == 3

    # --- solution ---

    def update_inverse(self, settings: KFACSettings) -> None:
        """Compute the solution, on the owner; on another rank of the column, make room for it."""
        if not self.solution:
            a, g = (self.layer.shapes()[name] for name in ("a", "g"))
            like_a, like_g = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in (a, g))
            self.solution = self._as_received(self.solver.identity(like_a, like_g))
        if self.is_owner:
            before = self.solution
            # Until a finite batch has entered the factors, the solution stays the identity. The host does not know.
            is_known = torch.stack([self.averages[name].weight for name in ("a", "g")]).all()
            a_factor, g_factor = (self._add_identity(self.factor(name), ~is_known) for name in ("a", "g"))
            solution = self.solver.update_inverse(a_factor, g_factor, settings.damping, before)
            solution = {name: torch.where(is_known, new, before[name]) for name, new in solution.items()}
            self.solution = self._as_received(solution)
            self.num_updates["solution"] += 1

    @staticmethod
    def _add_identity(factor: Tensor, times: Tensor) -> Tensor:
        """Add a multiple of the identity to a factor. Of a matrix of zeros, cuSOLVER finds no eigenvectors."""
        if factor.dim() == 3:
            factor.diagonal(dim1=1, dim2=2).add_(times)
            return factor
        return factor + times

    def _as_received(self, solution: Solution) -> Solution:
        """Cast and make contiguous, exactly as the receivers of a solution will have it.

        A matrix product on another memory layout rounds differently, and the ranks would drift apart.
        """
        return {
            name: tensor.to(self.device, self._matrix_dtype if tensor.dim() == 3 else self.dtype).contiguous()
            for name, tensor in solution.items()
        }

    def solution_messages(self) -> list[Message]:
        """Return the solution, to be sent or received."""
        return [Message(tensor, self.solver.symmetric and tensor.dim() == 3) for tensor in self.solution.values()]

    def is_ready(self) -> bool:
        """Return whether gradients can be preconditioned; the same on all ranks."""
        return self.has_factors if self.is_norm else self.has_solution

    def precondition(self, gradient: Tensor, damping: float) -> Tensor:
        """Return the preconditioned gradient, with the shape and type of `gradient`: see `Layer.matrix`.

        Those of norms are preconditioned together: see norm_group.py.
        """
        return self.solver.precondition(self.solution, gradient, damping)

    def curvature(self, direction: Tensor) -> Tensor:
        """Return dᵀ F d of a direction d, with F of the factors. On the owner only."""
        if self.is_norm:
            return torch.einsum("uj,ujk,uk->", direction, self.factor("unit"), direction)
        a, g = self.factor("a"), self.factor("g")
        return ((g @ direction) * (direction * a[:, None] if a.dim() == 2 else direction @ a)).sum()

    # --- gradients, costs and state ---

    def has_gradient(self) -> bool:
        """Return whether all of the layer's parameters have a gradient and are trainable."""
        return self.layer.is_trainable() and all(parameter.grad is not None for parameter in self.layer.parameters())

    def has_partial_gradient(self) -> bool:
        """Return whether only some of the layer's parameters have a gradient and are trainable."""
        return not self.has_gradient() and any(
            parameter.grad is not None and parameter.requires_grad for parameter in self.layer.parameters()
        )

    def factor_cost(self) -> float:
        """Return the cost of a factor update, in bytes that a device moves in the time that it takes.

        Per row, a matrix [n, n] takes the n elements of the row, and 2 n² operations; a diagonal takes one element.
        EKFAC's diagonal is left out: it would need the number of samples.
        """
        if self.is_norm:
            return float(NORM_BYTES * self.num_rows * self.layer.weight.numel())
        shapes = [shape for name, shape in self.layer.shapes().items() if name in SYMMETRIC]
        matrices = [shape[:2] for shape in shapes if len(shape) == 3]
        per_row = sum(groups * n * (ROW_BYTES + 2 * n / OPERATIONS_PER_BYTE) for groups, n in matrices)
        return self.num_rows * (per_row + ROW_BYTES * (len(shapes) - len(matrices)))

    def state_dict(self, with_solution: bool = True) -> dict[str, Any]:
        """Return what the next steps depend on: tensors themselves, not copies. Without a solution, one is due then."""
        return {
            "shapes": self.layer.shapes(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "solution": self.solution if with_solution else {},
            "num_rows": self.num_rows,
            "has_factors": self.has_factors,
            "has_solution": self.has_solution and with_solution,
        }

    def load_state_dict(self, state: dict[str, Any], is_in_column: bool) -> None:
        """Continue from the state of a layer's owner; take its solution only if this rank is of the layer's column."""
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        solution = state["solution"] if is_in_column else {}
        self.solution = self._as_received({name: tensor.clone() for name, tensor in solution.items()})
        self.num_rows, self.has_factors, self.has_solution = (
            state[name] for name in ("num_rows", "has_factors", "has_solution")
        )
        self.discard()


def layer_cost(layer: Layer) -> Cost:
    """Return a layer's cost, up to a common factor; diagonals and the units of a norm cost next to nothing."""
    shapes = layer.shapes()
    sizes = [(shape[0], shape[1]) for name, shape in shapes.items() if name in ("a", "g") and len(shape) == 3]
    inverse = sum(groups * n**3 for groups, n in sizes)
    return Cost(float(inverse), 2.0 * layer.num_elements() * sum(n for _, n in sizes))


def merge_state_dicts(
    states: Sequence[dict[str, Any]], own: dict[str, Any], blocks: Mapping[str, CurvatureBlock]
) -> dict[str, dict[str, Any]]:
    """Return the states of all layers, by name.

    Args:
        states: The states of all ranks that there were.
        own: A state of the preconditioner that is to have them: each must have its keys and its solver.
        blocks: The layers that they must have together, by name.

    Raises:
        ValueError: The states have other layers, shapes or another solver, or are not all of one step.
    """
    if not all(isinstance(state, dict) for state in states):
        raise ValueError("states: not dictionaries; call load_state_dict(*states)")
    lacking = {key for state in states for key in own.keys() - state.keys()}
    if lacking or not states:
        raise ValueError(f"states: none, or not those of a preconditioner (lacking: {', '.join(sorted(lacking))})")
    for name in ("steps", "factor_update_steps"):
        values = sorted({state[name] for state in states})
        if len(values) > 1:
            raise ValueError(f"states: of different runs or steps, with {name} = {', '.join(map(str, values))}")
    solvers = {state["solver"] for state in states}
    if solvers != {own["solver"]}:
        raise ValueError(f"solver: the state is of {', '.join(sorted(solvers))}, not {own['solver']}")
    layers = {name: layer for state in states for name, layer in state["layers"].items()}
    missing, unknown = sorted(blocks.keys() - layers.keys()), sorted(layers.keys() - blocks.keys())
    if missing or unknown:
        raise ValueError(f"layers: the states (of all ranks?) lack {missing}, and have {unknown} besides")
    for name, block in blocks.items():
        shapes = layers[name].get("shapes")
        if shapes != block.layer.shapes():
            raise ValueError(f"layer {name}: the state's factors are {shapes}, not {block.layer.shapes()}")
        if lacking := block.state_dict().keys() - layers[name].keys():
            raise ValueError(f"layer {name}: the state lacks {', '.join(sorted(lacking))}")
    return layers
