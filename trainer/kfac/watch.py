"""What a training loop may do wrong: told once, or refused."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

from torch import Tensor, nn

logger = logging.getLogger(__name__)


class Watch:
    """Over a model, from step to step."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, set(model.modules())
        self._warned: set[str] = set()
        self._left: list[tuple[weakref.ref[Tensor], int]] = []  # gradients, and how often they had been written to

    def warn(self, message: str, *arguments: object) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def modules(self) -> None:
        """Warns of new ones."""
        modules = set(self._model.modules())
        if not modules <= self._modules:
            self._modules = modules
            self.warn(
                "K-FAC was built for other modules than the model has now: what is new keeps its raw gradients; "
                "remove() the preconditioner and build it anew"
            )

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError where there are no gradients, or where none has changed since the last step."""
        gradients = [of.grad for of in parameters]
        if not gradients:
            raise RuntimeError("no layer has a gradient: call loss.backward() before step()")
        if len(gradients) == len(self._left) and all(
            before() is now and version == now._version
            for now, (before, version) in zip(gradients, self._left, strict=True)
        ):
            raise RuntimeError("all gradients are those that the last step() left: call loss.backward() before step()")

    def after_step(self, parameters: Iterable[nn.Parameter]) -> None:
        self._left = [(weakref.ref(of.grad), of.grad._version) for of in parameters]
