"""LitData's StreamingDataset and StreamingDataLoader on local chunks, Pillow."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from benchmarks.peers import Epochs, Task
from benchmarks.peers.pack_litdata import litdata, pack
from benchmarks.peers.packing import Job
from benchmarks.peers.pillow import prepare


class Photographs(litdata.StreamingDataset):
    def __init__(self, folder: str, task: Task) -> None:
        super().__init__(folder, shuffle=task.train)
        self._task = task

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        with Image.open(io.BytesIO(sample["image"])) as image:
            return prepare(image, self._task), sample["label"]


def open_epochs(folder: Path, task: Task) -> Epochs:
    if not (folder / "index.json").exists():
        images = folder.parent.parent / "images" / folder.name
        pack(Job(str(images), str(folder), resize=False, workers=1))
    loader = litdata.StreamingDataLoader(
        Photographs(str(folder), task), batch_size=task.batch_size, num_workers=task.workers
    )
    return lambda _epoch: loader
