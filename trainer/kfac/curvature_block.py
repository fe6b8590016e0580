"""A layer's block of the curvature: averages of its factors, and its solution, as far as this rank has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .assignment import Assignment, Cost
from .communication import Message
from .hooks import StatisticsHook
from .layers import Layer, Norm
from .settings import KFACSettings
from .solvers import Solution, Solver, precondition_units
from .symmetric import pack_triangle, packed_shape, unpack_triangle

SYMMETRIC = "a", "g", "unit"  # factors; EKFAC's "scale" is not


class RunningAverage:
    """f ← (decay · w · f + (1 - decay) · new) / w' with the weight w' = decay · w + 1 - decay.

    The division corrects the bias: the average begins with the first value, and not with zero or the identity. All
    work is done on the device, without waiting for it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, new: Tensor, decay: float, finite: Tensor) -> None:
        """Average a new value in, or count it as skipped.

        Args:
            new: The value, with the shape of the average.
            decay: The weight of what was before, from 0 to below 1.
            finite: Whether `new` is finite: a scalar of bool, on the same device.
        """
        self.weight.copy_(torch.where(finite, decay * self.weight + 1 - decay, self.weight))
        share = torch.where(finite, (1 - decay) / self.weight, 0.0)
        self.value.lerp_(torch.where(finite, new, self.value).to(self.value), share.to(self.value.dtype))
        self.skipped += ~finite

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves, not copies."""
        return {"value": self.value, "weight": self.weight, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values of another average into this one's tensors."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


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
        self._has_finite_factors = False
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

    def end_update(self, decay: float) -> None:
        """Average the factors of this step in, if they are finite."""
        if self.num_rows:  # a rank has used the layer
            new = {name: self.new[name] for name in self.averages if name in self.new}
            if new:
                # As they are sums of squares, infinities and NaN stay in them.
                finite = torch.stack([factor.sum() for factor in new.values()]).isfinite().all()
            for name, factor in new.items():
                self.averages[name].update(factor, decay, finite)
            self.has_factors = True
            self.num_updates["factors"] += bool(new)
        self.new = {}

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

    def has_finite_factors(self) -> bool:
        """Return whether any finite batch has entered the factors; until then the solution is the identity.

        Waits for the device, until it is True for the first time.
        """
        if not self._has_finite_factors:
            self._has_finite_factors = all(self.averages[name].weight.item() > 0 for name in ("a", "g"))
        return self._has_finite_factors

    # --- solution ---

    def update_inverse(self, settings: KFACSettings) -> None:
        """Compute the solution, on the owner; on another rank of the column, make room for it."""
        if not self.solution:
            a, g = (self.layer.shapes()[name] for name in ("a", "g"))
            like_a, like_g = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in (a, g))
            self.solution = self._as_received(self.solver.identity(like_a, like_g))
        if self.is_owner and self.has_finite_factors():
            a_factor, g_factor = self.factor("a"), self.factor("g")
            solution = self.solver.update_inverse(a_factor, g_factor, settings.damping, self.solution)
            self.solution = self._as_received(solution)
            self.num_updates["solution"] += 1

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
        """Return the preconditioned gradient, with the shape and type of `gradient`: see `Layer.matrix`."""
        if self.is_norm:
            unit = self.averages["unit"]
            return torch.where(unit.weight > 0, precondition_units(unit.value, gradient, damping), gradient)
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
        """Return the operations of a factor update, up to a common factor; a diagonal takes one for each row."""
        shapes = self.layer.shapes().values()
        return float(sum(prod(shape) if len(shape) == 3 else 1 for shape in shapes) * self.num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on: tensors themselves, not copies."""
        return {
            "shapes": self.layer.shapes(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "solution": self.solution,
            "num_rows": self.num_rows,
            "has_factors": self.has_factors,
            "has_solution": self.has_solution,
        }

    def load_state_dict(self, state: dict[str, Any], is_in_column: bool) -> None:
        """Continue from the state of a layer's owner; take its solution only if this rank is of the layer's column."""
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        solution = state["solution"] if is_in_column else {}
        self.solution = self._as_received({name: tensor.clone() for name, tensor in solution.items()})
        self._has_finite_factors = False
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
