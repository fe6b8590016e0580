"""FFCV's DatasetWriter.

Copied images go into a `BytesField`: its image field takes pixels and encodes them, whatever they come from. Resized
ones go into an `RGBImageField` as JPEG. That limits the longer side, here to what gives a 4:3 image the shorter side
asked for. OpenCV, which FFCV itself uses to scale and encode, decodes them: it is faster than Pillow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from ffcv.fields import BytesField, IntField, RGBImageField
from ffcv.reader import Reader
from ffcv.writer import DatasetWriter

from benchmarks.peers.packing import QUALITY, SHORT, Job, labelled_files

LONG = -(-SHORT * 4 // 3)
FILE = "train.beton"


class Files:
    """What the writer asks for: a sample by its number."""

    def __init__(self, source: str) -> None:
        self._files = labelled_files(source)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        path, label = self._files[i]
        return np.fromfile(path, np.uint8), label


class Pixels(Files):
    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        data, label = super().__getitem__(i)
        return cv2.imdecode(data, cv2.IMREAD_COLOR_RGB), label


def pack(job: Job) -> None:
    cv2.setNumThreads(1)  # as many processes as the others, and no threads beside them
    image = RGBImageField("jpg", max_resolution=LONG, jpeg_quality=QUALITY) if job.resize else BytesField()
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(str(Path(job.out) / FILE), fields, num_workers=job.workers)
    writer.from_indexed_dataset((Pixels if job.resize else Files)(job.source))


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    reader = Reader(str(Path(job.out) / FILE))
    sizes = dict(zip(reader.alloc_table["ptr"].tolist(), reader.alloc_table["size"].tolist(), strict=True))
    images, labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
    content = np.memmap(reader.file_name, mode="r")
    for place, label in zip(images["data_ptr" if job.resize else "ptr"].tolist(), labels.tolist(), strict=True):
        yield content[place : place + sizes[place]].tobytes(), label
