"""What loaders give.

Shapes: B samples per batch, C channels, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NoReturn

import torch


@dataclass(frozen=True)
class Batch:
    """One rank's slice of a global batch."""

    images: torch.Tensor  # uint8[B, C, H, W], channels last in memory
    labels: torch.Tensor  # int64[B]
    samples: torch.Tensor  # int64[B]: numbers in the data set, -1 for padding
    valid: torch.Tensor  # bool[B]: False for padding and for bad samples, whose images are black

    def __iter__(self) -> NoReturn:
        raise TypeError("a batch is not (images, labels): loop over loader.as_tuples(), or take its attributes")

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> Batch:
        """Copy to a device.

        Args:
            device: Device to copy to; what is there already is not copied.
            non_blocking: Whether not to wait for a copy from pinned memory to a GPU, as `torch.Tensor.to` has it.
        """
        return Batch(*(getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self)))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, from which a GPU copies without the host's waiting; what is on a device stays there.

        Raises RuntimeError without an accelerator.
        """
        tensors = (getattr(self, field.name) for field in fields(self))
        return Batch(*(tensor.pin_memory() if tensor.device.type == "cpu" else tensor for tensor in tensors))
