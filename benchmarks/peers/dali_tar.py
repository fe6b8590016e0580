"""NVIDIA DALI's own pipeline, as its documentation has it: its tar reader, its random crop.

It reads the tar shards that datapipe wrote, with their indexes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import feed_ndarray

from benchmarks.peers import Epochs, Task
from benchmarks.peers.idle import wait_until_idle
from datapipe.loaders.device import resolve_device

SHUFFLED = 1000
CPU = torch.device("cpu")


def open_epochs(folder: Path, task: Task, device: torch.device = CPU) -> Epochs:
    """`device`: where images are decoded, and delivered."""
    task.need_photographs()
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    indexes = [str(Path(shard).with_suffix(".idx")) for shard in shards]
    count = sum(int(Path(index).read_text().split()[1]) for index in indexes)

    on_gpu = device.type == "cuda"
    device_id = resolve_device(device).index if on_gpu else None

    @pipeline_def(batch_size=task.batch_size, num_threads=task.workers, device_id=device_id, seed=task.seed)
    def pipeline():
        data, label = fn.readers.webdataset(
            paths=shards, index_paths=indexes, ext=["jpg;jpeg", "cls"], random_shuffle=True, initial_fill=SHUFFLED
        )
        images = fn.decoders.image_random_crop(
            data,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            random_area=(0.08, 1.0),
            random_aspect_ratio=(3 / 4, 4 / 3),
        )
        images = fn.resize(images, size=[task.size, task.size], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()

    def epoch(_number: int):
        left = count
        while left > 0:
            images, labels = built.run()
            numbers = [int(bytes(np.asarray(labels.at(i)))) for i in range(len(labels))]
            num_images = min(left, task.batch_size)  # the reader continues with the next epoch: that is cut off
            images_BHWC = torch.empty((len(labels), task.size, task.size, 3), dtype=torch.uint8, device=device)
            feed_ndarray(images.as_tensor(), images_BHWC, cuda_stream=_stream(device))
            yield images_BHWC[:num_images].permute(0, 3, 1, 2), torch.tensor(numbers[:num_images])
            left -= num_images
        wait_until_idle()

    return epoch


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
