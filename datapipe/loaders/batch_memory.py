"""Memory that is used again: for batches, for blocks that are read, and for windows of images."""

from __future__ import annotations

import mmap
import weakref
from math import prod

import numpy as np
import torch

SPARE = 4  # one part in so many is added to a piece: the next images may be larger


class BatchMemory:
    """Arrays of one shape, each used again once no tensor and no array refers to it.

    Args:
        shape: Shape of each array.
        pinned: Whether each array is locked in memory, from which copies to a GPU need not be waited for.
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
        return _map(prod(self._shape)).reshape(self._shape)


class WindowMemory:
    """Pieces of memory of any size, each used again once the batch that it was for is gone. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, size: int, batch: object) -> np.ndarray:
        """Give a piece, uint8[size], that is the batch's as long as that lives."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _map(0)
        if len(memory) < size:
            memory = _map(size + size // SPARE)
        weakref.finalize(batch, self._free.append, memory).atexit = False
        return memory[:size]


def _map(size: int) -> np.ndarray:
    """Return new memory, whole pages, uint8[size]."""
    private = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(private, np.uint8, size)
