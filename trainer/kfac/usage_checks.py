"""What a training loop may do wrong: told once, or refused."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from .hooks import Capture
from .registration import require_whole

logger = logging.getLogger(__name__)


class Watch:
    """Over a model, from step to step."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._known = model, _learning(model)
        self._warned: set[str] = set()
        # Gradients, and how often they had been written to.
        self._left: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def warn(self, message: str, *arguments: object) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def parameters(self) -> None:
        """Warns of new ones."""
        learning = _learning(self._model)
        if not learning <= self._known:
            self.warn(
                "K-FAC was built for other parameters than the model has, or learns, now: these keep their raw "
                "gradients (remove() the preconditioner and build it anew): %s",
                ", ".join(sorted(learning - self._known)),
            )
            self._known = learning

    def present(self, layers: Mapping[str, nn.Module]) -> list[str]:
        """Those that are still in the model."""
        modules = set(self._model.modules())
        found = [name for name, module in layers.items() if module in modules]
        if len(found) < len(layers):
            self.warn(
                "K-FAC leaves these alone, which are not in the model any more: %s",
                ", ".join(sorted(layers.keys() - set(found))),
            )
        return found

    def before_step(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Raises RuntimeError where there are no gradients, or where none has changed since the last step; warns where
        some have not, if it can tell: a gradient that was written to through NumPy or `data` seems the same. Raises
        ValueError where parameters or gradients have been sharded, since which there may be none.
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
        if stale:
            self.warn(
                "K-FAC preconditions gradients again that no backward pass has changed since the last step(): clear "
                "all of the model's, also those that the optimizer does not have; here of: %s",
                ", ".join(stale),
            )

    def captured(self, captures: Sequence[Capture], not_sent: Sequence[Capture], micro_batches: int) -> None:
        """Warns of what makes factors wrong; `not_sent`: those that may lack micro-batches."""
        short = [capture for capture in not_sent if 0 < capture.num_micro_batches < micro_batches]
        if short and all(capture.num_uses > capture.num_micro_batches for capture in short):
            self.warn(
                "K-FAC: with accumulation_steps = %d, forward passes came before the backward pass of another "
                "micro-batch, and were taken for one: factors are wrong; call backward() after each",
                micro_batches,
            )
        numbers = sorted({capture.num_samples_now for capture in captures} - {0})
        if len(numbers) > 1 and micro_batches == 1:
            self.warn(
                "K-FAC: layers were used for different numbers of samples in a step, %s: one that has other things "
                "than the loss's samples along its first dimension is preconditioned wrongly; leave it out with `skip`",
                ", ".join(map(str, numbers)),
            )

    def too_many(self, micro_batches: int) -> None:
        self.warn(
            "K-FAC: more micro-batches than accumulation_steps = %d before step(); the first ones count (call "
            "discard() after a backward pass that no step() follows, and remove() a preconditioner that is not "
            "used any more)",
            micro_batches,
        )

    def incomplete(self, names: Sequence[str]) -> None:
        if names:
            self.warn(
                "K-FAC leaves the gradients of these as they are, some of whose parameters are frozen or have none: %s",
                ", ".join(names),
            )

    def unused(self, names: Sequence[str]) -> None:
        if names:
            self.warn(
                "K-FAC leaves the gradients of these as they are, whose modules it has not seen called in training "
                "mode (nor does it in a model that torch.compile's result has run before K-FAC was built): %s",
                ", ".join(names),
            )

    def _is_left(self, parameter: nn.Parameter) -> bool:
        """Is its gradient that of the last step?"""
        before, version = self._left.get(parameter, (lambda: None, 0))
        return before() is parameter.grad and parameter.grad._version == version

    def after_step(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        parameters = chain.from_iterable(layers.values())
        self._left = {of: (weakref.ref(of.grad), of.grad._version) for of in parameters}


def _learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
