"""Batches of images in host memory, and how they come to the device."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import numpy as np
import torch

from .batch import Batch
from .batch_slots import BatchMemory, ImageSlots
from .device import KeptForStream
from .engine import Delivery, Engine

ImagesT = TypeVar("ImagesT", bound=ImageSlots)


class HostDelivery(Delivery[ImagesT]):
    """Batches from host memory, on the device if there is one.

    Args:
        kind: The class of a batch's slots.
        shape: Shape of a batch's images: B, H, W, C.
        device: Device to which batches are delivered; from pinned memory to a GPU.
    """

    def __init__(self, kind: type[ImagesT], shape: tuple[int, ...], device: torch.device) -> None:
        self._kind = kind
        self._shape, self._device = shape, None if device.type == "cpu" else device
        self._memory = BatchMemory(shape, pinned=self._device is not None)
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._copying = KeptForStream()

    def set_size(self, size: int) -> None:
        batch_size, _, _, channels = self._shape
        self._shape = batch_size, size, size, channels
        self._memory = BatchMemory(self._shape, pinned=self._device is not None)

    def new_slots(self, positions: np.ndarray, count: int) -> ImagesT:
        """Make slots, with whatever an earlier batch has left in their memory."""
        return self._kind(positions, count, self._memory.take())

    def put_nothing(self, slots: ImagesT, slot: int | slice) -> None:
        slots.images[slot] = 0

    def finish(self, slots: ImagesT, engine: Engine[ImagesT]) -> Batch:
        """Make a batch of slots that are full, on the device."""
        images, *rest = (torch.from_numpy(a) for a in (slots.images, slots.labels, slots.samples, slots.valid))
        batch = Batch(images.permute(0, 3, 1, 2), *rest)
        return batch if self._device is None else self._copy(batch, self._device)

    def _copy(self, batch: Batch, device: torch.device) -> Batch:
        """Copy to the device without waiting, beside what it computes; the host's memory is kept until then."""
        with torch.cuda.stream(self._stream):
            delivered = batch.to(device)
        assert self._stream is not None
        current = torch.cuda.current_stream(device)
        current.wait_event(self._copying.keep(self._stream, batch))  # what is computed from now on, and not the host
        for field in fields(delivered):
            getattr(delivered, field.name).record_stream(current)  # its memory is not given away before that
        return delivered

    def drain(self) -> None:
        """Wait until nothing is being copied: memory may be used again."""
        self._copying.drain()
