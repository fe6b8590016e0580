"""WebDataset on the tar shards that datapipe wrote, decoded with Pillow in DataLoader's workers."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import webdataset
from PIL import Image
from torch import Tensor

from benchmarks.peers import Epochs, Task
from benchmarks.peers.pillow import prepare

SHUFFLED = 1000  # encoded samples that each worker draws from, as in WebDataset's examples


def open_epochs(folder: Path, task: Task) -> Epochs:
    def image(data: bytes) -> Tensor:
        with Image.open(io.BytesIO(data)) as opened:
            return prepare(opened, task)

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards) if task.train else False)
    if task.train:
        samples = samples.shuffle(SHUFFLED)
    samples = samples.to_tuple("jpg;png", "cls").map_tuple(image, int)
    # Each worker's last batch is short: dropping both would waste up to a fifth of a small corpus's work.
    batches = samples.batched(task.batch_size)
    loader = webdataset.WebLoader(
        batches,
        batch_size=None,
        num_workers=min(task.workers, len(shards)),
        persistent_workers=True,
    )
    return lambda _epoch: ((images, torch.as_tensor(labels)) for images, labels in loader)
