"""Adaptive damping: the rule of Levenberg and Marquardt, as in Martens and Grosse 2015, section 6.5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .preconditioner import KFAC

LOW, HIGH = 0.25, 0.75  # of the ratio, as in that section and in Levenberg's and Marquardt's rule


class AdaptiveDamping:
    """Adapts a preconditioner's damping λ to how well its quadratic model predicts the loss.

        adaptive = AdaptiveDamping(preconditioner)
        loss.backward()
        adaptive.begin(loss); preconditioner.step(); optimizer.step(); adaptive.end(lambda: loss_of(model(x), y))

    Once in `damping_update_steps` steps, the change of the loss on the same batch is compared with the prediction

        gᵀδ + ½ δᵀ (F + λ I) δ

    for the step δ that the optimizer took, whatever optimizer it is, with F of the factors (also of EKFAC's). Where the
    ratio of the two is above 3/4, λ is multiplied by `decay` once for each step since the last time; where it is below
    1/4, or the loss is not finite, λ is divided by it. Where the prediction is not a fall, λ stays. On such a step,
    gradients and parameters are kept twice, and the processor waits for the GPU once.

    The loss must be the same twice: no dropout. Every rank calls `begin` and `end`.

    Attributes:
        ratio: The last ratio; NaN before the first one.
    """

    def __init__(
        self,
        preconditioner: KFAC,
        damping_update_steps: int = 5,
        decay: float = 0.95,
        bounds: tuple[float, float] = (1e-8, 1e2),
    ) -> None:
        """Begin with the preconditioner's damping.

        Args:
            preconditioner: The one whose damping is set.
            damping_update_steps: Steps from one adaptation to the next, from 1.
            decay: The factor of λ for each step, above 0 to below 1.
            bounds: The smallest and the largest λ.

        Raises:
            ValueError: A setting is out of range.
        """
        steps: object = damping_update_steps  # or a type checker believes that no int is an Integral
        if not isinstance(steps, Integral) or steps < 1:
            raise ValueError(f"damping_update_steps: {damping_update_steps!r} is out of range; allowed: from 1")
        if not 0 < decay < 1:
            raise ValueError(f"decay: {decay!r} is out of range; allowed: above 0 to below 1")
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise ValueError(f"bounds: {bounds!r} are out of range; allowed: two numbers above 0 that rise")
        self.ratio = math.nan
        self._preconditioner, self._every = preconditioner, damping_update_steps
        self._decay, self._bounds = decay, bounds
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # values and gradients
        self._loss: Tensor | None = None

    @torch.no_grad()
    def begin(self, loss: Tensor) -> None:
        """Remember parameters and gradients, if an adaptation is due; before `preconditioner.step()`.

        Args:
            loss: The loss of this rank's batch, of all its micro-batches. Its gradients are in the parameters,
                unscaled.
        """
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
        """Adapt the damping, if that is due; after `optimizer.step()`.

        Args:
            loss_again: Returns the loss of the same batch now. What it does to the model's buffers, such as running
                averages, is undone.
        """
        if self._loss is None:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._preconditioner.model.buffers()]
        after = loss_again().detach().double()
        for buffer, before in buffers:
            buffer.copy_(before)
        world_size = self._preconditioner.communicator.world_size
        sums = torch.stack([(after - self._loss) / world_size, self._predicted_change(self._loss)])
        if world_size > 1:
            dist.all_reduce(sums)
        self._before, self._loss = {}, None
        change, predicted = sums.tolist()
        self._adapt(change, predicted)

    def _predicted_change(self, like: Tensor) -> Tensor:
        """Return this rank's part of the prediction: the layers that it owns, and on rank 0 what belongs to all ranks.

        Args:
            like: A scalar with the type and device of the result.
        """
        is_first = self._preconditioner.communicator.rank == 0
        predicted = torch.zeros_like(like)
        others = dict(self._before)
        for block in self._preconditioner.blocks.values():
            parameters = block.layer.parameters()
            before = {parameter: others.pop(parameter) for parameter in parameters if parameter in others}
            if not (is_first if block.is_norm else block.is_owner):
                continue
            if len(before) < len(parameters):  # frozen in part: its gradient stays as it is
                predicted += _change_along_gradients(before)
                continue
            step = block.layer.matrix(*(parameter.detach() - old for parameter, (old, _) in before.items()))
            step = step.to(block.dtype)
            gradient = block.layer.matrix(*(raw for _, raw in before.values())).to(block.dtype)
            predicted += (gradient * step).sum()
            if block.has_factors:
                predicted += (block.curvature(step) + self._preconditioner.damping * step.square().sum()) / 2
        if is_first:
            predicted += _change_along_gradients(others)  # parameters of no layer
        return predicted

    def _adapt(self, change: float, predicted: float) -> None:
        self.ratio = change / predicted if predicted else math.nan
        if math.isfinite(change) and (not predicted < 0 or LOW <= self.ratio <= HIGH):
            return
        is_good = math.isfinite(change) and self.ratio > HIGH
        damping = self._preconditioner.damping * self._decay ** (self._every if is_good else -self._every)
        self._preconditioner.damping = min(max(damping, self._bounds[0]), self._bounds[1])

    def state_dict(self) -> dict[str, float]:
        """Return the damping, which the preconditioner's own state leaves out, as it is a setting."""
        return {"damping": self._preconditioner.damping}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the damping to that of a state. Raises ValueError if it is out of range."""
        self._preconditioner.damping = state["damping"]


def _change_along_gradients(before: Mapping[nn.Parameter, tuple[Tensor, Tensor]]) -> Tensor | float:
    """Return gᵀδ of parameters, from the values and gradients before the step."""
    return sum((raw * (parameter.detach() - old)).sum() for parameter, (old, raw) in before.items())
