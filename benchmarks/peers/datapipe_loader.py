"""This project's loader."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers import Epochs, Task
from datapipe.loaders import open_loader
from datapipe.loaders.native_pixels import choose_native
from datapipe.sampling.augment import Augment


def open_epochs(
    folder: Path, task: Task, backend: str = "cpu", order: str = "full", cache: str | None = None
) -> Epochs:
    augment = Augment(crop=task.crop, pad=task.pad, flip=task.flip) if task.train else None
    loader = open_loader(
        folder,
        task.batch_size,
        backend=backend,
        train=task.train,
        size=task.size,
        seed=task.seed,
        augment=augment,
        order=order,
        cache=cache,
        threads=task.workers,
    )

    def epoch(number: int):
        loader.set_epoch(number)
        for batch in loader:
            if batch.valid.all():  # to pick the valid images would copy them all
                yield batch.images, batch.labels
            else:
                yield batch.images[batch.valid], batch.labels[batch.valid]

    return epoch


def describe_decoder(backend: str = "cpu") -> str:
    """Say whether images are decoded by the decoder in C, and by which."""
    return f"in C: {choose_native()}" if backend == "cpu" else backend
