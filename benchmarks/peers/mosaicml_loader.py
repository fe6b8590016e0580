"""MosaicML Streaming's StreamingDataset on local MDS shards, Pillow, torch's DataLoader."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.peers import Epochs, Task
from benchmarks.peers.pack_mosaicml import pack
from benchmarks.peers.packing import Job
from benchmarks.peers.pillow import prepare


def open_epochs(folder: Path, task: Task) -> Epochs:
    from streaming import StreamingDataset

    class Photographs(StreamingDataset):
        def __getitem__(self, i: int):
            sample = super().__getitem__(i)
            with Image.open(io.BytesIO(sample["image"])) as image:
                return prepare(image, task), sample["label"]

    if not (folder / "index.json").exists():
        images = folder.parent.parent / "images" / folder.name
        pack(Job(str(images), str(folder), resize=False, workers=1))
    data_set = Photographs(local=str(folder), batch_size=task.batch_size, shuffle=task.train)
    loader = DataLoader(data_set, task.batch_size, num_workers=task.workers, persistent_workers=True)
    return lambda _epoch: loader
