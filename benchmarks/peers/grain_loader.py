"""Google's Grain on ArrayRecord files of the photographs' own JPEG bytes, decoded and scaled with OpenCV.

Worker processes hand batches over in shared memory. One iterator serves all epochs.
"""

from __future__ import annotations

import random
import shutil
from itertools import islice
from pathlib import Path

import cv2
import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.peers import Epochs, Task
from benchmarks.peers.idle import wait_until_idle
from benchmarks.peers.packing import read_files
from benchmarks.peers.pillow import choose_window

SHARDS = 8
LABEL_BYTES = 4  # before an image's bytes in its record
WRITER = "group_size:1,uncompressed"  # for reading at random, and JPEG bytes do not get smaller


def open_epochs(folder: Path, task: Task) -> Epochs:
    task.need_photographs()
    if not folder.exists():
        _write(folder)
    records = grain.sources.ArrayRecordDataSource(sorted(map(str, folder.glob("*.arrayrecord"))))
    epoch_batches = (
        grain.MapDataset.source(records)
        .seed(task.seed)
        .shuffle()
        .map(lambda record: _prepare(record, task))
        .batch(task.batch_size, drop_remainder=False)
    )
    batches = iter(
        epoch_batches.repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=0))  # as it advises for data in memory
        .mp_prefetch(
            grain.MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=1),
            worker_init_fn=_use_one_thread,
        )
    )

    def epoch(_number: int):
        for images_BHWC, labels_B in islice(batches, len(epoch_batches)):
            yield torch.from_numpy(images_BHWC).permute(0, 3, 1, 2), torch.from_numpy(labels_B)
        wait_until_idle()

    return epoch


def _use_one_thread(_worker: int, _workers: int) -> None:
    cv2.setNumThreads(0)


def _prepare(record: bytes, task: Task) -> tuple[np.ndarray, np.int64]:
    image = cv2.imdecode(np.frombuffer(record, np.uint8, offset=LABEL_BYTES), cv2.IMREAD_COLOR_RGB)
    left, top, width, height = choose_window(task, image.shape[1], image.shape[0])
    window = image[top : top + height, left : left + width]
    image = cv2.resize(window, (task.size, task.size), interpolation=cv2.INTER_AREA)
    if task.flip and random.random() < 0.5:
        image = cv2.flip(image, 1)
    return image, np.int64(int.from_bytes(record[:LABEL_BYTES], "little"))


def _write(folder: Path) -> None:
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    writers = [ArrayRecordWriter(str(temporary / f"{i}.arrayrecord"), WRITER) for i in range(SHARDS)]
    for number, (image, label) in enumerate(read_files(folder.parent.parent / "images" / folder.name)):
        writers[number % SHARDS].write(label.to_bytes(LABEL_BYTES, "little") + image)
    for writer in writers:
        writer.close()
    temporary.rename(folder)
