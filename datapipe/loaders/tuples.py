"""A loader's batches as (images, labels), for loops that are written for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NoReturn

from torch import Tensor

NOT_PICKLED = (
    "a loader cannot be pickled or copied: it has threads and open files. Call open_loader in the process that reads "
    "the batches; state_dict() can be sent there"
)


class TupleLoader:
    """A loader's batches as (images, labels). All else that is asked of it, the loader answers: they are one.

    Slots that are not `valid` (padding, and bad samples) are left out, so that the last batch of an evaluation is
    shorter, as DataLoader's is; on several ranks it may be empty on some, since all ranks have equally many batches.
    """

    def __init__(self, loader: Any) -> None:  # a Loader, which makes these
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
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
