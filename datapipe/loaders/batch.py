"""What loaders give: batches, and the same as (images, labels).

Shapes: B samples per batch, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch

NOT_PICKLED = (
    "a loader cannot be pickled or copied: it has threads and open files. Call open_loader in the process that reads "
    "the batches; state_dict() can be sent there"
)


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


class TupleLoader:
    """A loader's batches as (images, labels), for loops that are written for `torch.utils.data.DataLoader`.

    All else that is asked of it, the loader answers: they are one.

    Slots that are not `valid` (padding, and bad samples) are left out, so that the last batch of an evaluation is
    shorter, as DataLoader's is; on several ranks it may be empty on some, since all ranks have equally many batches.
    """

    def __init__(self, loader: Any) -> None:  # a Loader, which makes these
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over an epoch, as the loader does: (uint8[B, C, H, W], int64[B])."""
        loader = self._loader
        may_be_bad = loader.options.max_bad > 0
        batches = iter(loader)
        with closing(batches):
            for batch in batches:
                pair = batch.images, batch.labels
                if may_be_bad or (loader.is_at_end and not loader.drop_last):  # else it need not wait for the device
                    pair = batch.images[batch.valid], batch.labels[batch.valid]
                del batch  # so that its memory is free for the next one
                yield pair
                del pair

    def __enter__(self) -> TupleLoader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loader.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)
