"""A staggered schedule: which layers update their factors, or their inverses, in a step. Pure, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from .assignment import spread


class Period(NamedTuple):
    """Steps `begin` to `begin + length - 1`, in which each layer is updated once."""

    number: int
    begin: int
    length: int


@lru_cache(maxsize=8)  # every layer asks for the same one
def period_of_step(step: int, every: int) -> Period:
    """Return the period that a step is in.

    Periods have `every` steps. The first `every` steps are divided into shorter ones, each twice as long as the one
    before, as the first batches say little about a network that changes fast. They begin at steps 0, 1, 2, 4, 8, …;
    with every = 10:

        step    0 | 1 | 2 3 | 4 5 6 7 | 8 9 | 10 … 19 | 20 … 29 | …
        number  0   1   2     3         4     1         2
    """
    if step >= every:
        number = step // every
        return Period(number, number * every, every)
    number = step.bit_length()  # 0 for step 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, …
    begin = 2**number // 2
    return Period(number, begin, min(max(begin, 1), every - begin))


class StaggeredSchedule:
    """Decides in which step of a period a layer is updated, such that all steps have about as much work.

    In each period a layer's turn comes one step later than in the period before. So a layer that is not used in every
    step is met by one of its turns. Turns depend on nothing except the costs: with the same groups they are the same
    for any number of ranks, and so is what is learnt.
    """

    def __init__(self, costs: Mapping[str, float], groups: Mapping[str, int], stagger: bool = True) -> None:
        """Make a schedule for one kind of update.

        Args:
            costs: The cost of each layer's update, in any unit.
            groups: The group of each layer. Layers of one group take turns with each other: the ranks wait for each
                other in a step, so what the owners do for themselves may as well fall into the same step.
            stagger: Without, all layers are updated in a period's first step.
        """
        self._costs, self._groups, self._stagger = costs, groups, stagger
        self._turns: dict[int, dict[str, int]] = {}  # by the length of the period

    def is_turn(self, name: str, step: int, every: int) -> bool:
        """Return whether a layer is updated in a step.

        Args:
            name: The layer.
            step: The number of the step, from 0.
            every: It is updated once in so many steps.
        """
        period = period_of_step(step, every)
        if not self._stagger:
            return step == period.begin
        return step - period.begin == (self._turns_of(period.length)[name] + period.number) % period.length

    def _turns_of(self, length: int) -> dict[str, int]:
        """Return each layer's step, from 0, in a period of `length` steps."""
        if length not in self._turns:
            turns: dict[str, int] = {}
            for group in set(self._groups.values()):
                turns |= spread({n: cost for n, cost in self._costs.items() if self._groups[n] == group}, length)
            self._turns[length] = turns
        return self._turns[length]
