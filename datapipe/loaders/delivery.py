"""Batches of images in host memory, and how they come to the device."""

from __future__ import annotations

from collections import deque
from dataclasses import fields

import numpy as np
import torch

from .base import Batch
from .batch_memory import BatchMemory
from .prefetch import BatchSlots


class Images(BatchSlots):
    """Slots with the images' memory: uint8[B, H, W, C]."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, count)
        self.images = images


class Delivery:
    """Batches from host memory, on the device if there is one.

    Args:
        shape: Of a batch's images: B, H, W, C.
        device: Where batches are delivered; from pinned memory to a GPU.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._memory = BatchMemory(shape, pinned=self._device is not None)
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._on_device: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def new_images(self) -> np.ndarray:
        """Give memory for one batch, with whatever an earlier one left in it."""
        return self._memory.take()

    def deliver(self, slots: Images) -> Batch:
        """Make a batch of slots that are full, on the device."""
        images, *rest = (torch.from_numpy(a) for a in (slots.images, slots.labels, slots.samples, slots.valid))
        batch = Batch(images.permute(0, 3, 1, 2), *rest)
        return batch if self._device is None else self._copy(batch, self._device)

    def _copy(self, batch: Batch, device: torch.device) -> Batch:
        """Copy to the device without waiting, beside what it computes; the host's memory is kept until then."""
        with torch.cuda.stream(self._stream):
            delivered = batch.to(device)
        event, current = torch.cuda.Event(), torch.cuda.current_stream(device)
        event.record(self._stream)
        current.wait_event(event)  # what is computed from now on, and not the host
        for field in fields(delivered):
            getattr(delivered, field.name).record_stream(current)  # its memory is not given away before that
        self._on_device.append((event, batch))
        while self._on_device[0][0].query() and len(self._on_device) > 1:
            self._on_device.popleft()
        return delivered

    def drain(self) -> None:
        """Wait until nothing is being copied: memory may be used again."""
        for event, _ in self._on_device:
            event.synchronize()
        self._on_device.clear()
