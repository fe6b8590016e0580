"""What a training loop may do wrong: a warning, once, or an error."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .registration import require_whole

logger = logging.getLogger(__name__)


class Watch:
    """Checks of how a model is used, step after step. Each warning is logged once."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._known = model, _learning(model)
        self._warned: set[str] = set()
        # The gradients that the last step left, and how often each had been written to.
        self._left: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def drop_removed(self, layers: Mapping[str, nn.Module]) -> list[str]:
        """Return the names of the layers that are still in the model, and warn of those that are not."""
        modules = set(self._model.modules())
        present = [name for name, module in layers.items() if module in modules]
        self._warn(
            "K-FAC leaves these alone, which are not in the model any more: %s", sorted(layers.keys() - set(present))
        )
        return present

    def require_new_gradients(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Check that a backward pass has written the gradients of these layers since the last step.

        A gradient that was written to through NumPy or `data` looks as if it had not been.

        Raises:
            RuntimeError: No layer has a gradient, or all gradients are as the last step left them. (If only some are,
                that is a warning.)
            ValueError: Parameters or gradients have been sharded, since which there may be no gradients.
        """
        for name, parameters in layers.items():
            require_whole(name, parameters)
        if not layers:
            for name, parameter in self._model.named_parameters():
                require_whole(name, [parameter])
            raise RuntimeError("no layer has a gradient: call loss.backward() before step()")
        stale = [name for name, parameters in layers.items() if all(map(self._is_left, parameters))]
        if len(stale) == len(layers):
            raise RuntimeError(
                "all gradients are those that the last step() left (or were written to through `data`, which leaves no "
                "trace): call loss.backward() before step()"
            )
        self._warn(
            "K-FAC preconditions gradients again that no backward pass has changed since the last step(): clear all of "
            "the model's, also those that the optimizer does not have; here of: %s",
            stale,
        )

    def remember_gradients(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """At the end of a step, keep which gradients it leaves, for `require_new_gradients`."""
        self._left = {
            parameter: (weakref.ref(parameter.grad), parameter.grad._version)
            for parameters in layers.values()
            for parameter in parameters
        }

    def _is_left(self, parameter: nn.Parameter) -> bool:
        gradient, version = self._left.get(parameter, (lambda: None, 0))
        return gradient() is parameter.grad and parameter.grad._version == version

    def warn_of_new_parameters(self) -> None:
        """Warn of parameters that learn, and did not when K-FAC was built."""
        learning = _learning(self._model)
        self._warn(
            "K-FAC was built for other parameters than the model has, or learns, now: these keep their raw gradients "
            "(remove() the preconditioner and build it anew): %s",
            sorted(learning - self._known),
        )

    def warn_of_incomplete(self, names: Sequence[str]) -> None:
        """Warn of layers of which only some parameters have a gradient."""
        self._warn(
            "K-FAC leaves the gradients of these as they are, some of whose parameters are frozen or have none: %s",
            names,
        )

    def warn_of_unused(self, names: Sequence[str]) -> None:
        """Warn of layers that have a gradient and were not called."""
        self._warn(
            "K-FAC leaves the gradients of these as they are, whose modules it has not seen called in training mode "
            "(nor does it in a model that torch.compile's result has run before K-FAC was built): %s",
            names,
        )

    def warn_of_more_micro_batches(self, accumulation_steps: int) -> None:
        """Warn of a backward pass after the last one of a step."""
        self._warn(
            "K-FAC: more micro-batches than accumulation_steps = %s before step(); the first ones count (call "
            "discard() after a backward pass that no step() follows, and remove() a preconditioner that is not used "
            "any more)",
            [str(accumulation_steps)],
        )

    def _warn(self, message: str, concerned: Sequence[str]) -> None:
        """Log a message about what is concerned, if anything is, and not a second time."""
        if concerned and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, ", ".join(concerned))


def _learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
