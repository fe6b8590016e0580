"""Meta's SPDL: its pipeline of threads, FFmpeg's decoder and scaler, on files in class folders."""

from __future__ import annotations

import random
from pathlib import Path

import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from benchmarks.peers import Epochs, Task
from benchmarks.peers.packing import labelled_files
from benchmarks.peers.pillow import _window


def open_epochs(folder: Path, task: Task) -> Epochs:
    task.need_photographs()
    files = labelled_files(str(folder))

    def decode(item: tuple[str, int]):
        path, label = item
        packets = spdl.io.demux_image(path)
        left, top, width, height = _window(packets.width, packets.height)
        mirror = "hflip," if task.flip and random.random() < 0.5 else ""
        scale = f"crop={width}:{height}:{left}:{top}:exact=1,scale={task.size}:{task.size}:flags=bilinear"
        return spdl.io.decode_packets(packets, filter_desc=f"{scale},{mirror}format=pix_fmts=rgb24"), label

    def convert(items: list):
        frames, labels = zip(*items, strict=True)
        return spdl.io.to_torch(spdl.io.convert_frames(list(frames))).permute(0, 3, 1, 2), torch.tensor(labels)

    def epoch(number: int):
        order = list(files)
        random.Random(number).shuffle(order)
        built = (
            PipelineBuilder()
            .add_source(iter(order))
            .pipe(decode, concurrency=task.workers)
            .aggregate(task.batch_size)
            .pipe(convert)
            .add_sink(2)
            .build(num_threads=task.workers)
        )
        with built.auto_stop():
            yield from built.get_iterator()

    return epoch
