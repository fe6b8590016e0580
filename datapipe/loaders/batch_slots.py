"""A batch that is being filled."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np


class ChunkReport(NamedTuple):
    """What a task in a thread took."""

    stage_s: dict[str, float]  # seconds, by stage
    read_bytes: int  # of samples


class BatchSlots:
    """A batch being filled: a slot for each position, of which the first `count` have a sample; the rest is padding."""

    def __init__(self, positions: np.ndarray, count: int) -> None:
        self.positions, self.count = positions, count
        self.valid = np.arange(len(positions)) < count
        self.samples = np.full(len(positions), -1, np.int64)
        self.labels = np.zeros(len(positions), np.int64)
        self.tasks: list[Future[ChunkReport | None]] = []  # that fill it; a task may add others before it is done
        self.known: Any = None  # what the source knows of the samples
        self.stop = np.zeros(1, np.uint8)  # not 0 once abandoned: the decoder in C looks at it, too

    @property
    def abandoned(self) -> bool:
        return bool(self.stop[0])

    def abandon(self) -> None:
        """Have nothing more done. A thread stops after its sample, and keeps the memory until then."""
        self.stop[0] = 1
        for task in self.tasks:
            task.cancel()


class Images(BatchSlots):
    """Slots with the images' memory: uint8[B, H, W, C]."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, count)
        self.images = images
