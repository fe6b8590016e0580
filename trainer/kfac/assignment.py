"""Who does what, and when: pure functions, without tensors.

The same on every rank, since they depend on nothing but their arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def spread(costs: Mapping[str, float], num_bins: int) -> dict[str, int]:
    """Each job's bin: the largest first, each into what is then the emptiest bin (longest processing time; Graham
    1969: the fullest is at most 4/3 of the best possible). Of equal ones the first by name, and the lowest bin.
    """
    bins = [(0.0, number) for number in range(num_bins)]
    found = {}
    for job in sorted(costs, key=lambda job: (-costs[job], job)):
        load, number = heapq.heappop(bins)
        found[job] = number
        heapq.heappush(bins, (load + costs[job], number))
    return found
