"""Memory that is used again: for batches, and for blocks that are read."""

from __future__ import annotations

import mmap
import weakref
from math import prod

import numpy as np
import torch


class BatchMemory:
    """Arrays of one shape, each used again once no tensor and no array refers to it.

    Args:
        shape: Of each array.
        pinned: Whether it is locked in memory, from which copies to a GPU need not be waited for.
    """

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """Give an array, uint8 on whole pages, with whatever the last batch left in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._new()
        # A tensor made of this view keeps it alive as long as any tensor shares the storage.
        view = memory[:]
        weakref.finalize(view, self._free.append, memory).atexit = False
        return view

    def _new(self) -> np.ndarray:
        if self._pinned:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True).numpy()
        private = mmap.mmap(-1, prod(self._shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(private, np.uint8).reshape(self._shape)
