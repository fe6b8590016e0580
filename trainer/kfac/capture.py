"""Hooks: what enters a layer and the gradient at its output, on the steps that want them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import Layer


class Capture:
    """Sums a layer's second moments over the micro-batches of a step.

    Both are taken when the output's gradient is there, so a forward pass without a backward pass counts for nothing,
    and so does one that activation checkpointing repeats. A layer that is used several times in a forward pass has
    that many more positions.

    `gradient_scale()`: what makes of the gradient of a mean those of each sample's own loss, for one sample.
    `complete(number)` is called after each micro-batch with how many there were.
    """

    def __init__(
        self, layer: Layer, gradient_scale: Callable[[], float | Tensor], complete: Callable[[int], None]
    ) -> None:
        self.layer, self.wanted = layer, False
        self._gradient_scale, self._complete = gradient_scale, complete
        self._waiting_for = 0  # uses in this forward pass
        self._counted = False  # the samples of this forward pass
        self.clear()
        self._handle = layer.module.register_forward_hook(self._after_forward, with_kwargs=True)

    def clear(self) -> None:
        self.moments: dict[str, Tensor] = {}
        self.num_samples = self.num_rows = self._num_micro_batches = 0

    def remove(self) -> None:
        self._handle.remove()

    def factors(self) -> dict[str, Tensor]:
        """Each factor of this step."""
        counts = {"samples": self.num_samples, "rows": self.num_rows}
        return {name: moment / counts[self.layer.factors[name]] for name, moment in self.moments.items()}

    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        if not (self.wanted and module.training and torch.is_grad_enabled() and output.requires_grad):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        self._waiting_for = 1 if self._counted else self._waiting_for + 1
        self._counted = False
        # On the tensor: a module's backward hook would not let an activation work in place behind it.
        output.register_hook(lambda gradient: self._after_backward(x, gradient.detach()))

    @torch.no_grad()
    def _after_backward(self, x: Tensor, gradient: Tensor) -> None:
        with torch.autocast(gradient.device.type, enabled=False):
            sums = self.layer.sums(x, gradient)
        square = (len(x) * self._gradient_scale()) ** 2
        for name, moment in sums.moments.items():
            if name != "a":  # of gradients, and cheaper to scale now
                moment = moment * square
            self.moments[name] = self.moments[name] + moment if name in self.moments else moment
        if not self._counted:
            self.num_samples += sums.num_samples
            self._num_micro_batches += 1
        self._counted = True
        self.num_rows += sums.num_rows
        self._waiting_for -= 1
        if self._waiting_for == 0:
            self._complete(self._num_micro_batches)
