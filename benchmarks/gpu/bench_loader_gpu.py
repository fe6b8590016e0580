"""How many decoded 224-pixel images a second reach a GPU, by which way?

    python -m benchmarks.gpu.bench_loader_gpu [--count 6000] [--rounds 5]

On a machine with one GPU, with the extra `dali` and, for its line, torchvision built for CUDA. Needs no network: where
the photographs of the other benchmarks cannot be had, it draws pictures of their size. Prints one table, writes
results/loader_gpu.json. `--device cpu` runs all that does not need a GPU, for a test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import corpus
from benchmarks.bench_loader import with_our_packs
from benchmarks.gpu import hardware
from benchmarks.measure import command_line, compare, environment, shown, table, timed, write_record
from benchmarks.peers import Task
from datapipe.dataset import DataSet
from datapipe.errors import DatapipeError
from datapipe.loaders import open_loader
from datapipe.sampling.augment import Augment, train_crops
from datapipe.sampling.order import permutation

SIZE, BATCH = 224, 256
PACKS = ("tar", "restart8", "raw256")
RANDOM_CROP = Augment("random_resized")
Epoch = Callable[[int], Iterator[torch.Tensor]]


def ours(folder: Path, device: torch.device, **settings) -> Epoch:
    loader = open_loader(folder, BATCH, size=SIZE, device=device, augment=RANDOM_CROP, **settings)

    def epoch(number: int) -> Iterator[torch.Tensor]:
        loader.set_epoch(number)
        return (batch.images for batch in loader)

    return epoch


def dali_alone(folder: Path, device: torch.device) -> Epoch:
    """DALI with its own tar reader and random crop."""
    from benchmarks.peers.dali_tar import open_epochs

    task = Task(SIZE, channels=3, crop="random_resized", batch_size=BATCH, workers=len(os.sched_getaffinity(0)))
    epochs = open_epochs(folder, task, device)
    return lambda number: (images for images, _ in epochs(number))


def torchvision_decode(folder: Path, device: torch.device) -> Epoch:
    """torchvision's `decode_jpeg` (nvJPEG on a GPU) of whole images, and one `interpolate` for each."""
    from torchvision.io import ImageReadMode, decode_jpeg

    data_set = DataSet(folder)
    widths, heights = (data_set.index[name].astype(np.int64) for name in ("width", "height"))

    def epoch(number: int) -> Iterator[torch.Tensor]:
        order = permutation(len(data_set), 0, number)
        for start in range(0, len(order) - BATCH + 1, BATCH):
            samples, positions = order[start : start + BATCH], np.arange(start, start + BATCH)
            crops = train_crops(RANDOM_CROP, widths[samples], heights[samples], SIZE, 0, number, positions)
            files = [torch.frombuffer(bytearray(data_set.read(i)), dtype=torch.uint8) for i in samples.tolist()]
            decoded = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
            images_BCHW = torch.empty((BATCH, 3, SIZE, SIZE), dtype=torch.uint8, device=device)
            for i, (image, (x, y, w, h), flip) in enumerate(
                zip(decoded, crops.boxes.tolist(), crops.flips.tolist(), strict=True)
            ):
                cut = image[None, :, y : y + h, x : x + w].float()
                cut = torch.nn.functional.interpolate(cut, size=(SIZE, SIZE), mode="bilinear", antialias=True)
                images_BCHW[i] = (cut.flip(-1) if flip else cut)[0].round().clamp(0, 255)
            yield images_BCHW

    return epoch


def ways(folder: Path, device: torch.device) -> dict[str, Callable[[], Epoch]]:
    plain, marked, pixels = (folder / name / "train" for name in PACKS)
    return {
        "dali, windows (--restart 8)": lambda: ours(marked, device, backend="dali"),
        "dali, whole images": lambda: ours(plain, device, backend="dali"),
        "cpu, windows (--restart 8)": lambda: ours(marked, device),
        "cpu, whole images": lambda: ours(plain, device),
        "pixels of 256": lambda: ours(pixels, device),
        "DALI's own reader": lambda: dali_alone(plain, device),
        "torchvision decode_jpeg": lambda: torchvision_decode(plain, device),
    }


def measure(epoch: Epoch, number: int, device: torch.device) -> dict[str, float]:
    """One epoch. Raises ValueError when a batch is not what it should be."""
    images = 0
    with timed() as seconds:
        for batch in epoch(number):
            images += len(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if batch.shape[1:] != (3, SIZE, SIZE) or batch.dtype != torch.uint8 or batch.device.type != device.type:
        raise ValueError(f"batches are {batch.dtype}{list(batch.shape)} on {batch.device}")
    rates = {"images_per_s": images / seconds["wall_s"], "images_per_cpu_s": images / seconds["cpu_s"]}
    return {"images": images, "wall_s": seconds["wall_s"], **rates}


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=5)
    parser.add_argument("--device", default="cuda", help="default: %(default)s; cpu writes no record")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu runs what needs none")

    described = environment()
    folder = with_our_packs(corpus.pictures(arguments.count), set(PACKS))
    epochs, absent = {}, {}
    for name, opened in ways(folder, device).items():
        try:
            epochs[name] = opened()
            measure(epochs[name], 0, device)  # warm-up
        except (ImportError, RuntimeError, DatapipeError) as error:
            epochs.pop(name, None)
            absent[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"without {name}: {absent[name]}", flush=True)
    keys = ("images_per_s", "images_per_cpu_s")
    figures = compare(list(epochs), arguments.rounds, lambda name, n: measure(epochs[name], n + 1, device), keys)
    rows = [[name, *(shown(row[key]) for key in keys)] for name, row in figures.items()]
    print("\n" + table(["images of 224×224 on the device", "images/s", "images/CPU-s"], rows))
    if device.type == "cuda":
        record = {"environment": described | hardware(device), "corpus": corpus.describe(folder), "batch_size": BATCH}
        print(write_record("loader_gpu", record | {"ways": figures, "absent": absent}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
