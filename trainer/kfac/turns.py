"""Whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .assignment import spread
from .block import Block


class Turns:
    """Each layer works once in a period of `every` steps, and a period's steps have about as much work. The first
    `every` steps are shorter periods, which begin with steps 0, 1, 2, 4, 8, …: the first batches say little of a
    network that changes fast. In each period turns come one step later, so that a layer which is not used in every
    step is met in one of them.
    """

    def __init__(self, stagger: bool, blocks: Mapping[str, Block]) -> None:
        self._stagger, self._blocks = stagger, blocks
        self._places: dict[tuple[str, int], dict[str, int]] = {}

    def updates(self, name: str, step: int, every: int) -> bool:
        """Does it average its factors?"""
        return self._is_turn("update", name, step, every, Block.update_cost)

    def refreshes(self, name: str, step: int, every: int) -> bool:
        """Does it compute its solution?"""
        return self._is_turn("refresh", name, step, every, lambda block: block.cost().refresh)

    def forget(self) -> None:
        """What layers cost, since more is known of it."""
        self._places.clear()

    def _is_turn(self, work: str, name: str, step: int, every: int, cost: Callable[[Block], float]) -> bool:
        if step < every:
            number = step.bit_length()
            begin = 2**number // 2
            length = min(max(begin, 1), every - begin)
        else:
            number, length = step // every, every
            begin = number * every
        if not self._stagger:
            return step == begin
        if (work, length) not in self._places:
            self._places[work, length] = spread({name: cost(block) for name, block in self._blocks.items()}, length)
        return step - begin == (self._places[work, length][name] + number) % length
