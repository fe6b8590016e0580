"""The factors of a step, from the backward pass into the averages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from .communication import Exchange
from .curvature_block import Block
from .schedule import Turns
from .settings import KFACSettings
from .usage_checks import Watch


class Updates:
    """Has layers captured in their turns, and what was captured sent to its owner and averaged.

    `every`: the `factor_update_steps` by which the turns of this step were decided.
    """

    def __init__(
        self, blocks: Mapping[str, Block], exchange: Exchange, settings: KFACSettings, turns: Turns, watch: Watch
    ) -> None:
        self._blocks, self._exchange, self._settings, self._turns, self._watch = (
            blocks, exchange, settings, turns, watch,
        )  # fmt: skip
        self.every = settings.factor_update_steps
        self._wanted: list[str] = []  # layers whose turn it is, as their factors are sent
        self._done: set[str] = set()  # those of which all micro-batches are there
        for name, block in blocks.items():
            block.capture.complete = partial(self._captured, name)

    def arm(self, step: int, every: int) -> None:
        """Have those layers captured whose factors this step updates."""
        self.every = every
        for name, block in self._blocks.items():
            here = block.is_owner or not (self._settings.local_factors and block.has_factors)
            block.capture.arm(here and self._turns.updates(name, step, every))
        self._wanted = [name for name, block in reversed(self._blocks.items()) if block.capture.wanted]
        self._done.clear()

    def _captured(self, name: str, num_micro_batches: int) -> None:
        """In the backward pass: with the last micro-batch a layer's factors may be sent, but in the same order on
        every rank: that in which a backward pass most often comes to the layers.
        """
        block = self._blocks[name]
        if name in self._done:
            self._watch.warn_of_more_micro_batches(self._settings.accumulation_steps)
            block.capture.clear()
        elif num_micro_batches == self._settings.accumulation_steps:
            block.begin_update()
            self._done.add(name)
            while self._wanted and self._wanted[0] in self._done:
                self._send(self._blocks[self._wanted.pop(0)])

    def _send(self, block: Block) -> None:
        if self._exchange.world_size > 1 and (block.is_norm or not self._settings.local_factors):
            is_known = bool(block.new)
            self._exchange.start_reducing(block.to_send(), None if block.is_norm else block.place.owner, is_known)

    def send_rest(self) -> None:
        """What was not sent in the backward pass, too: every rank sends the same. Waits for all of it."""
        for name in self._wanted:
            if name not in self._done:  # not all was there
                self._blocks[name].begin_update()
            self._send(self._blocks[name])
        self._wanted = []
        self._exchange.finish_reducing()

    def average(self) -> None:
        """All of the step's, once its last backward pass is through."""
        self.send_rest()
        wanted = [block for block in self._blocks.values() if block.capture.wanted]
        begun = [block for block in wanted if not block.has_factors]
        if begun:
            numbers = self._exchange.largest([block.num_rows for block in begun], begun[0].device)
            for block, number in zip(begun, numbers, strict=True):
                block.num_rows = number
            self._turns.forget()  # which depend on those
        for block in wanted:
            block.end_update(self._settings.factor_decay)
        if wanted:
            self._watch.warn_of_new_parameters()
