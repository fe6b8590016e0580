"""Hooks that sum a layer's statistics: of its inputs, and of the gradients at its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Layer, Sums
from .settings import KFACSettings


@dataclass
class ForwardCall:
    """A call of a layer. Its input is kept until the gradient at the output is there."""

    x: Tensor | None
    version: int
    is_recomputed: bool  # during a backward pass, by activation checkpointing


class StatisticsHook:
    """Sums a layer's statistics over the micro-batches of a step.

    They are summed when the gradient at the output is there. So a forward pass without a backward pass counts for
    nothing, nor does one that activation checkpointing recomputes later. A layer that is called several times in a
    forward pass has that many times the positions.

    Attributes:
        is_active: Whether this step's statistics are summed.
        on_complete: Function that is called after each micro-batch, with the number of micro-batches so far in this
            step.
        batch_size: Samples of the last micro-batch, whatever the fraction.
        num_samples: Samples that have been summed in this step.
        num_rows: Rows that have been summed in this step.
    """

    def __init__(self, layer: Layer, settings: KFACSettings) -> None:
        """Register the hook with the layer's module."""
        self.layer, self.is_active, self._settings = layer, False, settings
        self.on_complete: Callable[[int], None] = lambda _: None
        self._num_pending = 0  # calls of this forward pass whose gradients are not there yet
        self._is_counted = False  # Have the samples of this forward pass been counted?
        # Has there been a call under no_grad (activation checkpointing)? It may be recomputed, with gradients.
        self._may_be_recomputed = False
        self.batch_size = 0
        self.clear()
        # Before all other hooks, since what they return is not the layer's output.
        self._handle = layer.module.register_forward_hook(self._after_forward, with_kwargs=True, prepend=True)

    def clear(self) -> None:
        """Forget what has been summed."""
        self.sums: dict[str, Tensor] = {}
        self.num_samples = self.num_rows = self._num_micro_batches = 0

    def begin_step(self, is_active: bool) -> None:
        """Begin a step. A forward pass that no backward pass has followed is forgotten."""
        self.is_active, self._num_pending, self._is_counted = is_active, 0, False
        self._may_be_recomputed = False

    def remove(self) -> None:
        """Take the hook away from the module."""
        self._handle.remove()

    def take_factors(self) -> dict[str, Tensor]:
        """Return the factors of this step, in the memory of the sums. May be called once, before `clear`."""
        counts = {"samples": self.num_samples, "rows": self.num_rows}
        return {name: total.div_(counts[self.layer.factors[name]]) for name, total in self.sums.items()}

    def __reduce__(self) -> tuple[Callable[[], StatisticsHook], tuple[()]]:
        """Give a copy of the model (a pickle, an average of weights) a hook that does nothing."""
        return _inactive_hook, ()

    # Not compiled: `is_active` changes from step to step, and each combination would recompile the graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if not (self.is_active and module.training and self.layer.is_trainable()) or _is_transformed(output):
            return
        is_recomputed = torch._C._current_graph_task_id() != -1
        if self._is_counted and not is_recomputed:  # a new forward pass
            self._num_pending, self._is_counted = 0, False
        self._may_be_recomputed |= not torch.is_grad_enabled()
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        self._num_pending += not is_recomputed
        call = ForwardCall(x, x._version, is_recomputed)
        # On the tensor: a module's backward hook would not let an activation work in place behind it.
        output.register_hook(lambda gradient: self._after_backward(call, gradient))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _after_backward(self, call: ForwardCall, gradient: Tensor | None) -> None:
        if gradient is not None:  # what follows the layer may have none for it, as if it had not been called
            self._add(call, gradient.detach())
        self._num_pending -= not call.is_recomputed
        if self._is_counted and self._num_pending == 0 and not (call.is_recomputed or self._may_be_recomputed):
            self.on_complete(self._num_micro_batches)

    def _add(self, call: ForwardCall, gradient: Tensor) -> None:
        x = self._checked_input(call)
        num_samples = len(x)
        some = slice(math.ceil(self._settings.factor_fraction * num_samples))
        with torch.autocast(gradient.device.type, enabled=False):
            sums = self.layer.sums(x[some], gradient[some]) if num_samples else Sums({}, 0, 0)
        call.x = None  # the hook lives as long as the loss
        square = (num_samples * self._settings.gradient_scale()) ** 2
        for name, total in sums.by_factor.items():
            if name != "a":  # a sum of gradients, and cheaper to scale now
                total = total * square
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        if not self._is_counted:
            self.batch_size = num_samples
            self.num_samples += sums.num_samples
            self._num_micro_batches += 1
        self._is_counted = True
        self.num_rows += sums.num_rows

    def _checked_input(self, call: ForwardCall) -> Tensor:
        """Return the input of a call; raise RuntimeError if its statistics would be wrong."""
        name, x = type(self.layer.module).__name__, call.x
        if x is None:
            raise RuntimeError(
                f"{name}: a second backward pass through the same forward pass; K-FAC needs the gradient of the whole "
                "loss at once: add up the losses and call backward() once"
            )
        if x.dim() < self.layer.min_dims:
            raise RuntimeError(
                f"{name}: its input of shape {tuple(x.shape)} has no dimension for the samples, over which the "
                "loss is a mean"
            )
        if x._version != call.version:
            raise RuntimeError(f"{name}: its input was modified in place after it was used, and K-FAC needs it")
        if self._is_counted and len(x) != self.batch_size:
            raise RuntimeError(
                f"{name}: used for {self.batch_size} and for {len(x)} samples in one forward pass, and the "
                "loss is a mean over one of them; leave the layer out with `skip`"
            )
        if self._is_counted and self.layer.once_per_pass:
            raise RuntimeError(
                f"{name}: used twice in a forward pass, where EKFAC knows no diagonal; use KFAC or `skip`"
            )
        return x


def _is_transformed(output: Tensor) -> bool:
    """Return whether torch.func computes with it: its gradients are not those of the loss."""
    return torch._C._functorch.is_functorch_wrapped_tensor(output)


def _inactive_hook() -> StatisticsHook:
    hook = StatisticsHook.__new__(StatisticsHook)
    hook.is_active = False
    return hook
