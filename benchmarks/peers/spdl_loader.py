"""Meta's SPDL: its pipeline of threads, FFmpeg's decoder and scaler, on files in class folders.

In this process, or in a subprocess that hands its batches over through shared memory, as its documentation advises.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import spdl.io
import torch
from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

from benchmarks.peers import Epochs, Task
from benchmarks.peers.packing import labelled_files
from benchmarks.peers.pillow import choose_window

BATCHES = 2  # that are ready and wait
SEGMENTS = 2 * BATCHES + 3  # of shared memory, a batch each: in both processes' queues, and in work at either side
LABEL_BYTES, HEAD_BYTES = 8, 1 << 16


class Source:
    """The files and their labels: in training in a new order each time."""

    def __init__(self, files: Sequence[tuple[str, int]], shuffled: bool) -> None:
        self._files, self._shuffled = list(files), shuffled

    def __iter__(self) -> Iterator[tuple[str, int]]:
        if self._shuffled:
            random.shuffle(self._files)
        return iter(self._files)


def decode(task: Task, item: tuple[str, int]):
    path, label = item
    packets = spdl.io.demux_image(path)
    left, top, width, height = choose_window(task, packets.width, packets.height)
    mirror = "hflip," if task.train and task.flip and random.random() < 0.5 else ""
    scale = f"crop={width}:{height}:{left}:{top}:exact=1,scale={task.size}:{task.size}:flags=bilinear"
    return spdl.io.decode_packets(packets, filter_desc=f"{scale},{mirror}format=pix_fmts=rgb24"), label


def convert(items: list):
    frames, labels = zip(*items, strict=True)
    return spdl.io.to_torch(spdl.io.convert_frames(list(frames))), torch.tensor(labels)


def open_epochs(folder: Path, task: Task, runs_in: str = "") -> Epochs:
    task.need_photographs(or_centre=True)
    config = (
        PipelineBuilder()
        .add_source(Source(labelled_files(str(folder)), task.train))
        .pipe(
            partial(decode, task),
            concurrency=task.workers,
            output_order="completion" if task.train else "input",
        )
        .aggregate(task.batch_size)
        .pipe(convert)
        .add_sink(BATCHES)
    )
    if runs_in == "subprocess":
        image_bytes = task.channels * task.size**2
        arena = SharedMemorySegmentPool(task.batch_size * (image_bytes + LABEL_BYTES) + HEAD_BYTES, SEGMENTS)
        batches = run_pipeline_in_subprocess(
            config.get_config(), num_threads=task.workers, buffer_size=BATCHES, arena=arena
        )
        return lambda _epoch: _channels_first(batches)

    def epoch(_number: int):
        built = config.build(num_threads=task.workers)
        with built.auto_stop():
            yield from _channels_first(built.get_iterator())

    return epoch


def _channels_first(batches):
    return ((images_BHWC.permute(0, 3, 1, 2), labels_B) for images_BHWC, labels_B in batches)
