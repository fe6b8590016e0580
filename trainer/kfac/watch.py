"""What a training loop may do wrong: told once, or refused."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from .capture import Capture

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
            self._known = learning
            self.warn(
                "K-FAC was built for other parameters than the model has, or learns, now: what is new keeps its raw "
                "gradients; remove() the preconditioner and build it anew"
            )

    def before_step(self, layers: Mapping[str, Sequence[nn.Parameter]], micro_batches: int) -> list[str]:
        """Those of the layers, which have gradients, where they are new since the last step. Raises RuntimeError where
        there are none.
        """
        if not layers:
            raise RuntimeError("no layer has a gradient: call loss.backward() before step()")
        written = {name: max(map(self._written, parameters)) for name, parameters in layers.items()}
        new = [name for name, times in written.items() if times]
        if not new:
            raise RuntimeError("all gradients are those that the last step() left: call loss.backward() before step()")
        if len(new) < len(layers):
            self.warn(
                "K-FAC leaves gradients alone that no backward pass has changed since the last step(), here of: %s",
                ", ".join(name for name in layers if name not in new),
            )
        if micro_batches == 1 and (added := [name for name, times in written.items() if times == 1]):
            self.warn(
                "K-FAC: gradients were added to those that the last step() left, which it has preconditioned already, "
                "here of: %s; clear all of the model's, also those that the optimizer does not have",
                ", ".join(added),
            )
        return new

    def captured(self, captures: Iterable[Capture], not_sent: Iterable[Capture], micro_batches: int) -> None:
        """Warns of what makes factors wrong; `not_sent`: those that may not be complete."""
        if any(0 < capture.num_micro_batches < micro_batches for capture in not_sent):
            self.warn(
                "K-FAC: fewer micro-batches than accumulation_steps = %d before step(), or forward passes that came "
                "before the backward pass of another micro-batch: their factors are wrong",
                micro_batches,
            )
        numbers = sorted({capture.num_samples_now for capture in captures} - {0})
        if len(numbers) > 1:
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

    def unused(self, names: Sequence[str]) -> None:
        if names:
            self.warn(
                "K-FAC leaves the gradients of these as they are, whose modules it has not seen called in training "
                "mode (nor does it in a model that torch.compile's result has run before K-FAC was built): %s",
                ", ".join(names),
            )

    def _written(self, parameter: nn.Parameter) -> float:
        """How many times its gradient was, since the last step."""
        before, version = self._left.get(parameter, (lambda: None, 0))
        return parameter.grad._version - version if before() is parameter.grad else math.inf

    def after_step(self, parameters: Iterable[nn.Parameter]) -> None:
        self._left = {of: (weakref.ref(of.grad), of.grad._version) for of in parameters}


def _learning(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.requires_grad}
