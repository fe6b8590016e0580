"""Batches that are being filled, and memory that is used again: for batches, blocks, and windows of images."""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import Future
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

_SPARE = 4  # one part in so many is added to a piece: the next images may be larger


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

    @property
    def is_full(self) -> bool:
        """Whether all tasks are done, be it with an error."""
        return all(task.done() for task in self.tasks)

    def abandon(self) -> None:
        """Have nothing more done. A thread stops after its sample, and keeps the memory until then."""
        self.stop[0] = 1
        for task in self.tasks:
            task.cancel()


SlotsT = TypeVar("SlotsT", bound=BatchSlots)


class ImageSlots(BatchSlots):
    """Slots with the images' memory: uint8[B, H, W, C]."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, count)
        self.images = images


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
            memory = _map(size + size // _SPARE)
        weakref.finalize(batch, self._free.append, memory).atexit = False
        return memory[:size]


def _map(size: int) -> np.ndarray:
    """Return new memory, whole pages, uint8[size]."""
    private = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(private, np.uint8, size)
