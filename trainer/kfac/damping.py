"""Adaptive damping: the rule of Levenberg and Marquardt, as in Martens and Grosse 2015, section 6.5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .preconditioner import KFAC

LOW, HIGH = 0.25, 0.75  # of the ratio, there and in Levenberg's and Marquardt's rule


class AdaptiveDamping:
    """Changes a preconditioner's damping λ by how well its quadratic model foretells the loss:

        adaptive = AdaptiveDamping(preconditioner)
        loss.backward()
        adaptive.begin(loss); preconditioner.step(); optimizer.step(); adaptive.end(lambda: loss_of(model(x), y))

    Every `damping_update_steps` steps, the change of the loss on the same batch is compared with

        gᵀδ + ½ δᵀ (F + λ I) δ

    for the step δ that the optimizer took, whatever optimizer it is, and F of the factors (of EKFAC, too). Where the
    ratio of the two is above 3/4, λ is multiplied by `decay` once for each step since the last time; below 1/4, or if
    the loss is not finite, divided by it. Where the model foretells no fall, λ stays. On such a step, gradients and
    parameters are kept twice, and the processor waits for the GPU once.

    `bounds` of λ. The loss must be the same twice: no dropout. Every rank calls both. Raises ValueError for a setting
    out of range.
    """

    def __init__(
        self,
        preconditioner: KFAC,
        damping_update_steps: int = 5,
        decay: float = 0.95,
        bounds: tuple[float, float] = (1e-8, 1e2),
    ) -> None:
        if not isinstance(damping_update_steps, Integral) or damping_update_steps < 1:
            raise ValueError(f"damping_update_steps: {damping_update_steps!r} is out of range; allowed: from 1")
        if not 0 < decay < 1:
            raise ValueError(f"decay: {decay!r} is out of range; allowed: above 0 to below 1")
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise ValueError(f"bounds: {bounds!r} are out of range; allowed: two numbers above 0 that rise")
        self.ratio = math.nan
        """The last one."""
        self._preconditioner, self._every, self._decay, self._bounds = (
            preconditioner, damping_update_steps, decay, bounds,
        )  # fmt: skip
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._loss: Tensor | None = None

    @torch.no_grad()
    def begin(self, loss: Tensor) -> None:
        """Before `preconditioner.step()`, with unscaled gradients. `loss`: of this rank's batch, all micro-batches."""
        self._before, self._loss = {}, None
        if (self._preconditioner.steps + 1) % self._every:
            return
        self._loss = loss.detach().double()
        self._before = {
            parameter: (parameter.detach().clone(), parameter.grad.clone())
            for parameter in self._preconditioner.model.parameters()
            if parameter.grad is not None
        }

    @torch.no_grad()
    def end(self, loss_again: Callable[[], Tensor]) -> None:
        """After `optimizer.step()`. `loss_again()`, called when it is due, is the loss of the same batch now; what it
        does to the model's buffers, such as running averages, is undone.
        """
        if self._loss is None:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._preconditioner.model.buffers()]
        after = loss_again().detach().double()
        for buffer, before in buffers:
            buffer.copy_(before)
        world_size = self._preconditioner.exchange.world_size
        found = torch.stack([(after - self._loss) / world_size, self._foretold()])
        if world_size > 1:
            dist.all_reduce(found)
        self._before, self._loss = {}, None
        self._adapt(*found.tolist())

    def _foretold(self) -> Tensor:
        """This rank's part: of the layers that it owns, and on the first rank of what belongs to all."""
        is_first = self._preconditioner.exchange.rank == 0
        foretold = torch.zeros_like(self._loss)
        left = dict(self._before)
        for block in self._preconditioner.blocks.values():
            parameters = block.layer.parameters()
            kept = {parameter: left.pop(parameter) for parameter in parameters if parameter in left}
            if not (is_first if block.is_norm else block.is_owner):
                continue
            if len(kept) < len(parameters):  # frozen in part: its gradient stays as it is
                foretold += _along_gradients(kept)
                continue
            step = block.layer.matrix(*(of.detach() - old for of, (old, _) in kept.items())).to(block.dtype)
            gradient = block.layer.matrix(*(raw for _, raw in kept.values())).to(block.dtype)
            foretold += (gradient * step).sum()
            if block.has_factors:
                foretold += (block.curvature(step) + self._preconditioner.damping * step.square().sum()) / 2
        if is_first:
            foretold += _along_gradients(left)  # no layer's
        return foretold

    def _adapt(self, change: float, foretold: float) -> None:
        self.ratio = change / foretold if foretold else math.nan
        if math.isfinite(change) and (not foretold < 0 or LOW <= self.ratio <= HIGH):
            return
        is_good = math.isfinite(change) and self.ratio > HIGH
        damping = self._preconditioner.damping * self._decay ** (self._every if is_good else -self._every)
        self._preconditioner.damping = min(max(damping, self._bounds[0]), self._bounds[1])

    def state_dict(self) -> dict[str, float]:
        """The damping, which the preconditioner's own state leaves out, as a setting."""
        return {"damping": self._preconditioner.damping}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises ValueError for a damping out of range."""
        self._preconditioner.damping = state["damping"]


def _along_gradients(before: Mapping[nn.Parameter, tuple[Tensor, Tensor]]) -> Tensor | float:
    """gᵀδ of parameters that were with those values and gradients."""
    return sum((raw * (parameter.detach() - old)).sum() for parameter, (old, raw) in before.items())
