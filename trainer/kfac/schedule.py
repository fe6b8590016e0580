"""A staggered schedule: which layers update their factors, or their inverses, in a step. Pure, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from .assignment import spread


class UpdateCost(NamedTuple):
    """What a layer's updates cost, in any unit.

    Layers of one `group` take turns with each other: the ranks wait for each other in a step, so what the owners do for
    themselves may as well fall into the same step.
    """

    factors: float
    inverse: float
    group: int = -1


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

    def __init__(self, costs: Mapping[str, UpdateCost], stagger: bool = True) -> None:
        """Make a schedule for the layers of `costs`. Without `stagger`, all are updated in a period's first step."""
        self._stagger = stagger
        groups = {name: cost.group for name, cost in costs.items()}
        self._factors = _Turns({name: cost.factors for name, cost in costs.items()}, groups)
        self._inverses = _Turns({name: cost.inverse for name, cost in costs.items()}, groups)

    def updates_factors(self, name: str, step: int, every: int) -> bool:
        """Return whether a layer averages its factors in a step.

        Args:
            name: The layer.
            step: The number of the step, from 0.
            every: It averages them once in so many steps.
        """
        return self._is_turn(self._factors, name, step, every)

    def updates_inverse(self, name: str, step: int, every: int) -> bool:
        """Return whether a layer computes its solution in a step.

        Args:
            name: The layer.
            step: The number of the step, from 0.
            every: It computes one once in so many steps.
        """
        return self._is_turn(self._inverses, name, step, every)

    def _is_turn(self, turns: _Turns, name: str, step: int, every: int) -> bool:
        period = period_of_step(step, every)
        if not self._stagger:
            return step == period.begin
        return step - period.begin == (turns.in_period(period.length)[name] + period.number) % period.length


class _Turns:
    """Spreads one kind of work over the steps of a period."""

    def __init__(self, costs: Mapping[str, float], groups: Mapping[str, int]) -> None:
        self._costs, self._groups = costs, groups
        self._by_length: dict[int, dict[str, int]] = {}

    def in_period(self, length: int) -> dict[str, int]:
        """Return each layer's step, from 0, in a period of `length` steps."""
        if length not in self._by_length:
            turns: dict[str, int] = {}
            for group in set(self._groups.values()):
                turns |= spread({n: cost for n, cost in self._costs.items() if self._groups[n] == group}, length)
            self._by_length[length] = turns
        return self._by_length[length]
