"""Keep and read blocks in three slots, as others do at the same time, and print how often a block was there.

FOLDER SEED
"""

import random
import sys
from pathlib import Path

import numpy as np

from datapipe.dataset.block_slots import BUSY, BlockSlots

BLOCKS, ROUNDS = 8, 1000
slots, chance = BlockSlots(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
room, hits = memoryview(bytearray(1 << 16)), 0


def choose(tags: np.ndarray) -> int:
    """Return a slot that no process is writing to."""
    return chance.choice([slot for slot in range(3) if tags[slot] != BUSY] or [0])


for _ in range(ROUNDS):
    block = chance.randrange(BLOCKS)
    content = bytes([block]) * (60_000 + block)
    data = slots.read(block, len(content), room)
    if data is None:
        slots.keep(block, memoryview(content), choose)
    else:
        assert bytes(data) == content
        hits += 1
print(hits)
