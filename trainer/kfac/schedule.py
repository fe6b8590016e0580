"""Whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .assignment import spread
from .curvature_block import Block


class Turns:
    """Each layer works once in a period of `every` steps, and a period's steps have about as much work. The first
    `every` steps are shorter periods, which begin with steps 0, 1, 2, 4, 8, …: the first batches say little of a
    network that changes fast. In each period turns come one step later, so that a layer which is not used in every
    step is met in one of them.

    Turns are the same for any number of ranks, and so is what is learnt. `by_owner`, where that is not so anyway: each
    owner's layers take turns among themselves. The others wait for an owner, so that they may as well work.
    """

    def __init__(self, stagger: bool, by_owner: bool, blocks: Mapping[str, Block]) -> None:
        self._stagger, self._by_owner, self._blocks = stagger, by_owner, blocks
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
            costs: dict[int, dict[str, float]] = {}
            for of, block in self._blocks.items():
                owner = block.place.owner if self._by_owner and not block.is_norm else -1
                costs.setdefault(owner, {})[of] = cost(block)
            self._places[work, length] = {of: at for some in costs.values() for of, at in spread(some, length).items()}
        return step - begin == (self._places[work, length][name] + number) % length
