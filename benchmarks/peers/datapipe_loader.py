"""This project's loader."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers import Epochs, Task
from datapipe.augment import Augment
from datapipe.loaders import open_loader


def open_epochs(folder: Path, task: Task, backend: str = "cpu") -> Epochs:
    augment = Augment(crop=task.crop, pad=task.pad, flip=task.flip)
    loader = open_loader(
        folder,
        task.batch_size,
        backend=backend,
        train=task.train,
        size=task.size,
        seed=task.seed,
        augment=augment,
        threads=task.workers,
    )

    def epoch(number: int):
        loader.set_epoch(number)
        return ((batch.images[batch.valid], batch.labels[batch.valid]) for batch in loader)

    return epoch
