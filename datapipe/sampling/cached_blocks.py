"""Which blocks of the order "blocks" a node keeps on its disk, where not all fit (pure).

The order of all epochs is known. So of the blocks that it has, a node evicts the one that it needs again last, and does
not keep one that it needs again even later: Belady's algorithm, which has the fewest misses (Belady 1966; with the
choice not to keep a block, Mattson et al. 1970). A single node keeps what it has, unless a block is not needed in the
next epoch: each is read once in each epoch, so that nothing else would save a read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .block_order import NEVER

EPOCH = 1 << 40  # turns: more than an epoch has
FREE = -1  # the tag of a slot without a block
HORIZON = 32  # the most epochs to look ahead


class NextUses:
    """When a node needs each block next, as seen from a place in an epoch.

    Args:
        turns: Function that returns, for an epoch, the place of each block in the sequence in which the node reads
            them, `BlockOrder.turns`.
        epoch: Number of the epoch, from 0.
        horizon: Number of epochs to look ahead, from 1.

    Attributes:
        reads_all: Whether the node reads all blocks in the epoch, as the only node of a job does.
    """

    def __init__(self, turns: Callable[[int], np.ndarray], epoch: int, horizon: int) -> None:
        self._now = turns(epoch)  # int64[num_blocks]
        self.reads_all = bool((self._now < NEVER).all())
        self._later = np.full(len(self._now), NEVER)
        for ahead in range(min(horizon, HORIZON), 0, -1):
            then = turns(epoch + ahead)
            self._later = np.where(then < NEVER, then + ahead * EPOCH, self._later)

    def after(self, block: int, blocks: np.ndarray) -> np.ndarray:
        """Return when blocks are needed after the turn of one of them.

        Args:
            block: Number of the block that is read now.
            blocks: Numbers of blocks, or FREE, int64[N].

        Returns:
            Times, int64[N], later for later uses; NEVER for what is not needed within the horizon, or FREE.
        """
        now, later = self._now[blocks], self._later[blocks]
        is_ahead = (now > self._now[block]) & (now < NEVER)
        return np.where(blocks < 0, NEVER, np.where(is_ahead, now, later))


def choose_slot(uses: NextUses, block: int, tags: np.ndarray) -> int | None:
    """Choose where to keep a block that a node has just read.

        >>> uses = NextUses(lambda epoch: [np.array([0, 1, 2]), np.array([0, NEVER, 1])][epoch], 0, horizon=1)
        >>> choose_slot(uses, 2, np.array([0, 1]))  # the next epoch needs block 2, and not block 1
        1
        >>> choose_slot(uses, 1, np.array([0, 2])) is None
        True

    Args:
        uses: Uses of the blocks, as seen from this epoch.
        block: Number of the block.
        tags: Block that each slot holds, or FREE, or less if a process is writing to it, int64[num_slots].

    Returns:
        The slot, whose block is evicted; None: it is not to be kept.
    """
    free = np.flatnonzero(tags == FREE)
    if len(free):
        return int(free[0])
    times = np.where(tags < FREE, -1, uses.after(block, tags))
    slot = int(times.argmax())
    ends = times[slot], uses.after(block, np.array([block]))[0]
    if uses.reads_all:  # each block once in each epoch: within one, an exchange saves no read, and costs a write
        ends = ends[0] // EPOCH, ends[1] // EPOCH
    return slot if ends[0] > ends[1] else None
