"""Hooks: what enters a layer and the gradient at its output, on the steps that want them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import Layer, Sums


@dataclass
class Use:
    """Of a layer in a forward pass: its input, as it was then, until its gradient was there."""

    x: Tensor | None
    version: int
    is_again: bool  # in a backward pass, which activation checkpointing does


class Capture:
    """Sums a layer's second moments over the micro-batches of a step.

    Both are taken when the output's gradient is there, so a forward pass without a backward pass counts for nothing,
    and so does one that activation checkpointing repeats. A layer that is used several times in a forward pass has
    that many more positions.

    `gradient_scale()`: what makes of the gradient of a mean those of each sample's own loss, for one sample.
    `complete(number)` is called after each micro-batch with how many there were. `fraction` of the samples are taken,
    the first ones, at least one.
    """

    def __init__(
        self,
        layer: Layer,
        gradient_scale: Callable[[], float | Tensor],
        fraction: float = 1.0,
    ) -> None:
        self.layer, self.wanted = layer, False
        self._fraction = 1.0 if layer.whole_batch else fraction
        self._gradient_scale = gradient_scale
        self.complete: Callable[[int], None] = lambda _: None
        self._waiting_for = 0  # uses in this forward pass
        self._counted = False  # the samples of this forward pass
        self._may_come_again = False  # uses without gradients, of which the backward pass may repeat some with them
        self.num_samples_now = 0  # of the last micro-batch, whatever the fraction
        self.clear()
        # First, since what other hooks return is not the layer's output.
        self._handle = layer.module.register_forward_hook(self._after_forward, with_kwargs=True, prepend=True)

    def clear(self) -> None:
        self.moments: dict[str, Tensor] = {}
        self.num_samples = self.num_rows = self.num_micro_batches = 0

    def arm(self, wanted: bool) -> None:
        """For the next step. A forward pass that no backward pass has followed is forgotten."""
        self.wanted, self._waiting_for, self._counted = wanted, 0, False
        self._may_come_again = False

    def remove(self) -> None:
        self._handle.remove()

    def factors(self) -> dict[str, Tensor]:
        """Each factor of this step, once: in the moments' memory."""
        counts = {"samples": self.num_samples, "rows": self.num_rows}
        return {name: moment.div_(counts[self.layer.factors[name]]) for name, moment in self.moments.items()}

    def __reduce__(self) -> tuple:
        """A model's copy (an average of weights, a pickle) has the hook, but not the preconditioner behind it."""
        return _without_effect, ()

    @torch.compiler.disable  # compiled, it would be so anew for each set of layers whose turn it is
    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        if not (self.wanted and module.training and self.layer.learns()) or _is_transformed(output):
            return
        is_again = torch._C._current_graph_task_id() != -1
        if self._counted and not is_again:  # a new forward pass
            self._waiting_for, self._counted = 0, False
        self._may_come_again |= not torch.is_grad_enabled()
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        self._waiting_for += not is_again
        use = Use(x, x._version, is_again)
        # On the tensor: a module's backward hook would not let an activation work in place behind it.
        output.register_hook(lambda gradient: self._after_backward(use, gradient))

    @torch.no_grad()
    def _after_backward(self, use: Use, gradient: Tensor | None) -> None:
        if gradient is not None:  # what comes after may have none for it: as if it had not been used
            self._take(use, gradient.detach())
        self._waiting_for -= not use.is_again
        if self._counted and self._waiting_for == 0 and not (use.is_again or self._may_come_again):
            self.complete(self.num_micro_batches)

    def _take(self, use: Use, gradient: Tensor) -> None:
        self._check(use)
        num_samples = len(use.x)
        some = slice(math.ceil(self._fraction * num_samples))
        with torch.autocast(gradient.device.type, enabled=False):
            sums = self.layer.sums(use.x[some], gradient[some]) if num_samples else Sums({}, 0, 0)
        use.x = None  # the hook lives as long as the loss
        square = (num_samples * self._gradient_scale()) ** 2
        for name, moment in sums.moments.items():
            if name != "a":  # of gradients, and cheaper to scale now
                moment = moment * square
            self.moments[name] = self.moments[name] + moment if name in self.moments else moment
        if not self._counted:
            self.num_samples_now = num_samples
            self.num_samples += sums.num_samples
            self.num_micro_batches += 1
        self._counted = True
        self.num_rows += sums.num_rows

    def _check(self, use: Use) -> None:
        name = type(self.layer.module).__name__
        if use.x is None:
            raise RuntimeError(
                f"{name}: a second backward pass through the same forward pass; K-FAC needs the gradient of the whole "
                "loss at once: add up the losses and call backward() once"
            )
        if use.x.dim() < self.layer.min_dims:
            raise RuntimeError(
                f"{name}: its input of shape {tuple(use.x.shape)} has no dimension for the samples, over which the "
                "loss is a mean"
            )
        if use.x._version != use.version:
            raise RuntimeError(f"{name}: its input was modified in place after it was used, and K-FAC needs it")
        if self._counted and len(use.x) != self.num_samples_now:
            raise RuntimeError(
                f"{name}: used for {self.num_samples_now} and for {len(use.x)} samples in one forward pass, and the "
                "loss is a mean over one of them; leave the layer out with `skip`"
            )
        if self._counted and self.layer.only_once:
            raise RuntimeError(
                f"{name}: used twice in a forward pass, of which EKFAC knows no diagonal; use KFAC or `skip`"
            )


def _is_transformed(output: Tensor) -> bool:
    """By torch.func, whose gradients are not those of the loss."""
    return torch._C._functorch.is_functorch_wrapped_tensor(output)


def _without_effect() -> Capture:
    capture = Capture.__new__(Capture)
    capture.wanted = False
    return capture
