"""How long a training thread takes to launch ResNet-50's kernels, while the threads of its loader make the next batch.

    python -m benchmarks.launch_times BESIDE FOLDER THREADS

BESIDE is "nothing"; "cutting" windows out of the data set in FOLDER for a decoder on a GPU; or "summing", which makes
checksums (CRC-32) of as many bytes, without the interpreter's lock. Each line on standard input is a number of passes;
the answer, a line of JSON, has the milliseconds of each.

A pass takes a batch, which the loader replaces with THREADS threads, and calls the network. That has ResNet-50's layers
with 1/64 of its channels, on 1 pixel: what takes the time is to call them. Then the thread sleeps, as a GPU would work.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

from benchmarks.bench_reading import NoDelivery
from datapipe.dataset import DataSet
from datapipe.loaders.base import DataDescription
from datapipe.loaders.cpu import make_source
from datapipe.loaders.engine import Engine
from datapipe.loaders.options import LoaderOptions
from datapipe.loaders.window_cutter import EncodedImages, WindowCutter
from datapipe.sampling.augment import Augment
from trainer.models.resnet import Bottleneck

BATCH, SIZE = 256, 224
BLOCKS = 3, 4, 6, 3  # ResNet-50
PAUSE_S = 0.065
WARM_UP = 5  # passes


def cut_windows(folder: Path, num_threads: int) -> Iterator[EncodedImages]:
    """Yield batches without end."""
    augment = Augment("random_resized")
    options = LoaderOptions(BATCH, size=SIZE, threads=num_threads, augment=augment, timeout_s=600.0)
    data_set = DataSet(folder)
    data, source = DataDescription.from_data_set(data_set), make_source(data_set, options)
    loader = Engine(data, options, source, WindowCutter(options), NoDelivery())
    while True:
        yield from loader


def sum_bytes(count: int, num_threads: int) -> Iterator[None]:
    """Yield while threads sum up `count` bytes, and begin again at each step."""
    with ThreadPoolExecutor(num_threads) as pool:
        memory = bytes(count // num_threads)
        while True:
            tasks = [pool.submit(zlib.crc32, memory) for _ in range(num_threads)]
            yield None
            for task in tasks:
                task.result()


def work_beside(name: str, folder: Path, num_threads: int) -> Iterator[object]:
    if name == "cutting":
        return cut_windows(folder, num_threads)
    if name == "summing":
        sizes = DataSet(folder).index["size"]
        return sum_bytes(round(BATCH * float(sizes.mean())), num_threads)
    return repeat(None)


def make_network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 1, 1, bias=False), nn.BatchNorm2d(1), nn.ReLU(), nn.MaxPool2d(1)]
    channels = 1
    for stage, count in enumerate(BLOCKS):
        for _ in range(count):
            layers.append(Bottleneck(channels, 2**stage, stride=1))
            channels = 2**stage * Bottleneck.expansion
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def main() -> int:
    beside, folder, num_threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    network, images_BCHW = make_network(), torch.randn(2, 3, 1, 1)
    batches = work_beside(beside, folder, num_threads)

    def measure_pass() -> dict[str, float]:
        began = time.perf_counter()
        next(batches)
        launching, cpu_began = time.perf_counter(), time.thread_time()
        with torch.no_grad():
            network(images_BCHW)
        ended, cpu_ended = time.perf_counter(), time.thread_time()
        time.sleep(PAUSE_S)
        seconds = {"launch": ended - launching, "launch_cpu": cpu_ended - cpu_began, "wait": launching - began}
        return {f"{name}_ms": 1e3 * value for name, value in seconds.items()}

    for line in sys.stdin:
        for _ in range(WARM_UP):
            measure_pass()
        print(json.dumps({"passes": [measure_pass() for _ in range(int(line))]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
