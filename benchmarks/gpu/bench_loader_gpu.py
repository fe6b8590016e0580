"""How many decoded 224-pixel images a second reach a GPU, by which way?

With the extra `dali` and, for its line, torchvision built for CUDA. Where the photographs of the other benchmarks are
missing, pictures of their size are drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import corpus
from benchmarks.bench_loader import PACKS
from benchmarks.gpu import Conditions, Figures, Step
from benchmarks.gpu.bench_train_gpu import DALI, make_pictures
from benchmarks.measure import summarise, timed
from benchmarks.peers import Task
from datapipe.dataset import DataSet
from datapipe.loaders import open_loader
from datapipe.sampling.augment import Augment, train_crops
from datapipe.sampling.order import permutation

RANDOM_CROP = Augment("random_resized")
KEYS = ("images_per_s", "images_per_cpu_s")
Epoch = Callable[[int], Iterator[torch.Tensor]]


def ours(folder: Path, at: Conditions, **settings) -> Epoch:
    loader = open_loader(
        folder, at.batch_size, size=at.size, device=torch.device(at.device), augment=RANDOM_CROP, **settings
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        loader.set_epoch(number)
        return (batch.images for batch in loader)

    return epoch


def dali_alone(folder: Path, at: Conditions) -> Epoch:
    """DALI with its own tar reader and random crop."""
    from benchmarks.peers.dali_tar import open_epochs

    workers = len(os.sched_getaffinity(0))
    task = Task(at.size, channels=3, crop="random_resized", batch_size=at.batch_size, workers=workers)
    epochs = open_epochs(folder, task, torch.device(at.device))
    return lambda number: (images for images, _ in epochs(number))


def torchvision_decode(folder: Path, at: Conditions) -> Epoch:
    """torchvision's `decode_jpeg` (nvJPEG on a GPU) of whole images, and one `interpolate` for each."""
    from torchvision.io import ImageReadMode, decode_jpeg

    data_set, size, batch_size = DataSet(folder), at.size, at.batch_size
    widths, heights = (data_set.index[name].astype(np.int64) for name in ("width", "height"))

    def epoch(number: int) -> Iterator[torch.Tensor]:
        order = permutation(len(data_set), 0, number)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            samples, positions = order[start : start + batch_size], np.arange(start, start + batch_size)
            crops = train_crops(RANDOM_CROP, widths[samples], heights[samples], size, 0, number, positions)
            files = [torch.frombuffer(bytearray(data_set.read(i)), dtype=torch.uint8) for i in samples.tolist()]
            decoded = decode_jpeg(files, mode=ImageReadMode.RGB, device=at.device)
            images_BCHW = torch.empty((batch_size, 3, size, size), dtype=torch.uint8, device=at.device)
            for i, (image, (x, y, w, h), flip) in enumerate(
                zip(decoded, crops.boxes.tolist(), crops.flips.tolist(), strict=True)
            ):
                cut = image[None, :, y : y + h, x : x + w].float()
                cut = torch.nn.functional.interpolate(cut, size=(size, size), mode="bilinear", antialias=True)
                images_BCHW[i] = (cut.flip(-1) if flip else cut)[0].round().clamp(0, 255)
            yield images_BCHW

    return epoch


def measure_epoch(epoch: Epoch, number: int, at: Conditions) -> dict[str, float]:
    """One epoch. Raises ValueError when a batch is not what it should be."""
    images = 0
    with timed() as seconds:
        for batch in epoch(number):
            images += len(batch)
        if at.device == "cuda":
            torch.cuda.synchronize()
    if batch.shape[1:] != (3, at.size, at.size) or batch.dtype != torch.uint8 or batch.device.type != at.device:
        raise ValueError(f"batches are {batch.dtype}{list(batch.shape)} on {batch.device}")
    rates = {"images_per_s": images / seconds["wall_s"], "images_per_cpu_s": images / seconds["cpu_s"]}
    return {"images": images, "wall_s": seconds["wall_s"], **rates}


def load(at: Conditions, pack: str, open_way: Callable[[Path, Conditions], Epoch]) -> Figures:
    """Load some epochs from a folder of the corpus, the first of which is not counted."""
    folder = make_pictures(at).parent
    if pack in PACKS:
        corpus.packed_as(folder, pack, PACKS[pack])
    epoch = open_way(folder / pack / "train", at)
    measure_epoch(epoch, 0, at)
    runs = [measure_epoch(epoch, 1 + number, at) for number in range(at.rounds)]
    return summarise(runs, KEYS) | {"corpus": corpus.describe(folder)}


WAYS = {
    "dali, windows (--restart 8)": ("restart8", partial(ours, backend="dali"), DALI),
    "dali, whole images": ("tar", partial(ours, backend="dali"), DALI),
    "cpu, windows (--restart 8)": ("restart8", ours, ()),
    "cpu, whole images": ("tar", ours, ()),
    "pixels of 256": ("raw256", ours, ()),
    "DALI's own reader": ("tar", dali_alone, DALI),
    "torchvision decode_jpeg": ("tar", torchvision_decode, ("torchvision",)),
}
STEPS = [
    Step(f"loader: {name}", partial(load, pack=pack, open_way=way), 30, 120, needs)
    for name, (pack, way, needs) in WAYS.items()
]
