"""An exponential moving average of a network, which is evaluated in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import torch
from torch import Tensor, nn

from ..optim.settings import Count, Positive, Section, or_none


class EmaSettings(Section):
    """An average of the weights and running statistics of the last steps (Polyak and Juditsky 1992).

    It is evaluated in the network's place, and stands in checkpoints as "average".
    """

    half_life_steps: Annotated[Positive | None, or_none()] = None
    """Steps after which what a step contributes has fallen to half; "none": there is no average."""
    update_every_steps: Count = 1
    """Steps between updates of the average."""


class Average:
    """The moving average of a network's parameters and floating-point buffers; does nothing where settings say so.

    Args:
        module: The network, which is not replaced later.
        settings: Settings of the average, such as its half-life.
    """

    def __init__(self, module: nn.Module, settings: EmaSettings) -> None:
        self._every, self._half_life_steps = settings.update_every_steps, settings.half_life_steps
        self._module = module
        self._average: dict[str, Tensor] = {}

    @property
    def is_on(self) -> bool:
        """Return whether there is an average yet."""
        return bool(self._average)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the network's state after a step into the average, of which it is the whole at first."""
        if self._half_life_steps is None:
            return
        if not self._average:
            self._average = {name: value.detach().clone() for name, value in self._own().items()}
        elif step % self._every == 0:
            own = self._own()
            weight = 1.0 - 0.5 ** (self._every / self._half_life_steps)
            torch._foreach_lerp_(list(self._average.values()), [own[name] for name in self._average], weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the network the average for a block, if there is one yet; what changes in the block is the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        own = self._own()
        for name, value in self._average.items():
            kept = own[name].clone()
            own[name].copy_(value)
            value.copy_(kept)

    def _own(self) -> dict[str, Tensor]:
        return {
            name: value for name, value in self._module.state_dict(keep_vars=True).items() if value.is_floating_point()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Continue from an average, by the names of the network's state; None: from before the first update.

        Raises:
            KeyError: It is of another network.
        """
        self._average = {}
        if state is not None and self._half_life_steps is not None:
            self._average = {name: own.detach().clone().copy_(state[name]) for name, own in self._own().items()}
