"""Memory for batches, and for runs."""

from __future__ import annotations

import weakref

import numpy as np
import torch


class BatchMemory:
    """Memory for batches, used again once no tensor and no array refers to it."""

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """uint8 of the shape, with whatever the last batch left in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        # A tensor made of this view keeps it alive as long as any tensor shares the storage.
        view = memory[:]
        weakref.finalize(view, self._free.append, memory).atexit = False
        return view
