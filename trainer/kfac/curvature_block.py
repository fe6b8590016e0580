"""A layer's block of the curvature: what is known of it on this rank."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .assignment import Cost, Place
from .communication import Part
from .hooks import Capture
from .layers import Layer, Norm
from .running_average import RunningAverage
from .solvers import Solver, State, unit_solution
from .symmetric import fold, folded_shape, unfold

SYMMETRIC = "a", "g", "unit"


class Block:
    """The owner of a block has the averages of its factors, and the ranks of its column the solution. A norm's block is
    small: every rank has all of it, and there is no solution to keep. Symmetric factors are kept folded (triangles.py).
    """

    def __init__(self, capture: Capture, place: Place, rank: int, inv_dtype: str | None = None) -> None:
        self.capture, self.layer, self.place = capture, capture.layer, place
        weight = self.layer.module.weight
        self.device, self.dtype = weight.device, torch.promote_types(weight.dtype, torch.float32)
        self._matrix_dtype = getattr(torch, inv_dtype) if inv_dtype else self.dtype
        self.is_norm = isinstance(self.layer, Norm)
        self.is_owner = self.is_norm or place.owner == rank
        shapes = self.shapes() if self.is_owner else {}
        self.averages = {name: RunningAverage(shape, self.dtype, self.device) for name, shape in shapes.items()}
        self.new: dict[str, Tensor] = {}  # the factors of this step
        self.state: State = {}
        self.num_rows = 0  # of the first batch, the same on all ranks: whose turn it is depends on it
        self._known = False
        self.has_factors = self.has_solution = False

    def begin_update(self) -> None:
        """Take the factors of this step from what was captured, if anything was."""
        new = self.capture.factors() if self.capture.num_samples else {}
        self.new = {name: fold(factor) if self._is_folded(name) else factor for name, factor in new.items()}
        self.num_rows = self.num_rows or self.capture.num_rows
        self.capture.clear()

    def to_send(self) -> list[Part]:
        """The factors of this step, to be averaged over the ranks; where there are none, room is made for them."""
        if not self.new:
            shapes = self.shapes().items()
            self.new = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name, shape in shapes}
        return [Part(factor) for factor in self.new.values()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what is kept and sent of the factors."""
        return {
            name: folded_shape(shape) if self._is_folded(name) else shape for name, shape in self.layer.shapes().items()
        }

    def factor(self, name: str) -> Tensor:
        """The average, whole."""
        value = self.averages[name].value
        return unfold(value, self.layer.shapes()[name][-1]) if self._is_folded(name) else value

    def _is_folded(self, name: str) -> bool:
        return name in SYMMETRIC and len(self.layer.shapes()[name]) == 3

    def end_update(self, decay: float) -> None:
        if self.num_rows:  # a rank has used the layer
            new = {name: self.new[name] for name in self.averages if name in self.new}
            # Of sums of squares: infinities and NaN stay in them.
            finite = torch.stack([factor.sum() for factor in new.values()]).isfinite().all() if new else None
            for name, factor in new.items():
                self.averages[name].update(factor, decay, finite)
            self.has_factors = True
        self.new = {}

    def discard(self) -> None:
        """What was captured since the last step."""
        self.new = {}
        self.num_rows = self.num_rows if self.has_factors else 0
        self.capture.clear()

    def refresh(self, solver: Solver, damping: float) -> None:
        """On the owner: compute the solution; on others of the column: make room for it."""
        if not self.state:
            a, g = (self.layer.shapes()[name] for name in ("a", "g"))
            a, g = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in (a, g))
            self.state = self._kept(solver.empty(a, g))
        if self.is_owner and self.is_known():
            self.state = self._kept(solver.refresh(self.factor("a"), self.factor("g"), damping, self.state))

    def _kept(self, state: State) -> State:
        """As those have it whom it is sent: products with another layout are rounded otherwise."""
        return {
            name: tensor.to(self.device, self._matrix_dtype if tensor.dim() == 3 else self.dtype).contiguous()
            for name, tensor in state.items()
        }

    def is_known(self) -> bool:
        """False as long as no batch was finite; the state leaves gradients as they are then. Waits for the device, but
        not any more once it is True.
        """
        self._known = self._known or all(self.averages[name].weight.item() > 0 for name in ("a", "g"))
        return self._known

    def solution(self, solver: Solver) -> list[Part]:
        return [Part(tensor, solver.symmetric and tensor.dim() == 3) for tensor in self.state.values()]

    def precondition(self, solver: Solver, gradient: Tensor, damping: float) -> Tensor:
        if self.is_norm:
            unit = self.averages["unit"]
            return torch.where(unit.weight > 0, unit_solution(unit.value, gradient, damping), gradient)
        return solver.precondition(self.state, gradient, damping)

    def curvature(self, direction: Tensor) -> Tensor:
        """dᵀ F d of the factors, on the owner."""
        if self.is_norm:
            return torch.einsum("uj,ujk,uk->", direction, self.factor("unit"), direction)
        a, g = self.factor("a"), self.factor("g")
        return ((g @ direction) * (direction * a[:, None] if a.dim() == 2 else direction @ a)).sum()

    def has_gradient(self) -> bool:
        return self.layer.learns() and all(parameter.grad is not None for parameter in self.layer.parameters())

    def has_part_of_gradient(self) -> bool:
        some = any(of.grad is not None and of.requires_grad for of in self.layer.parameters())
        return some and not self.has_gradient()

    def cost(self) -> Cost:
        return cost(self.layer)

    def update_cost(self) -> float:
        """Up to a factor; a diagonal takes an operation a row."""
        shapes = self.layer.shapes().values()
        return float(sum(prod(shape) if len(shape) == 3 else 1 for shape in shapes) * self.num_rows)

    def state_dict(self) -> dict:
        return {
            "shapes": self.layer.shapes(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "solution": self.state,
            "num_rows": self.num_rows,
            "has_factors": self.has_factors,
            "has_solution": self.has_solution,
        }

    def load_state_dict(self, state: dict, in_column: bool) -> None:
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        solution = state["solution"] if in_column else {}
        self.state = self._kept({name: tensor.clone() for name, tensor in solution.items()})
        self._known = False
        self.num_rows, self.has_factors, self.has_solution = (
            state[name] for name in ("num_rows", "has_factors", "has_solution")
        )
        self.discard()


def cost(layer: Layer) -> Cost:
    """Up to a factor; a diagonal and a norm's units cost next to nothing."""
    shapes = layer.shapes()
    sizes = [(shape[0], shape[1]) for name, shape in shapes.items() if name in ("a", "g") and len(shape) == 3]
    refresh = sum(groups * n**3 for groups, n in sizes)
    return Cost(float(refresh), 2.0 * layer.num_elements() * sum(n for _, n in sizes))
