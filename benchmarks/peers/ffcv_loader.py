"""FFCV's Loader: JPEG, half JPEG and half pixels ("smart"), pixels, and pixels of 256×256.

Its image field takes pixels and encodes them. So that all decode the same photographs, the files' own JPEG bytes are
put in place of what it would encode. The pixels of 256×256 are those that `datapipe pack --store raw --size 256` made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import ffcv.fields.rgb_image as rgb_image
import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter

from benchmarks.peers import Epochs, Task
from benchmarks.peers.packing import Job, labelled_files
from benchmarks.peers.pillow import CENTRE

FIELDS = {
    "ffcv-jpg": {"write_mode": "jpg"},
    "ffcv-smart": {"write_mode": "proportion", "compress_probability": 0.5},
    "ffcv-raw": {"write_mode": "raw"},
    "ffcv-raw256": {"write_mode": "raw"},
}
FILE = "train.beton"
PIXELS = "raw256"  # our packed pixels, in npy shards


class Photograph(np.ndarray):
    """Pixels that know the file they come from."""

    file: np.ndarray


class Photographs(Sequence):
    def __init__(self, source: Path) -> None:
        self._files = labelled_files(str(source))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        path, label = self._files[i]
        file = np.fromfile(path, np.uint8)
        pixels = cv2.imdecode(file, cv2.IMREAD_COLOR_RGB).view(Photograph)
        pixels.file = file
        return pixels, label


class Pixels(Sequence):
    def __init__(self, source: Path) -> None:
        shards = sorted(path for path in source.glob("*.npy") if path.name.count(".") == 1 and path.stem != "index")
        self._images = np.concatenate([np.load(path) for path in shards])
        self._labels = np.concatenate([np.load(path.with_suffix(".labels.npy")) for path in shards])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self._images[i], int(self._labels[i])


def open_epochs(folder: Path, task: Task, beyond_memory: bool = False) -> Epochs:
    """As all peers do. `beyond_memory`: read as FFCV's documentation advises where a data set does not fit into memory,
    through a cache of its own, and in an order that goes through it in pages."""
    task.need_photographs(or_centre=True)
    file = folder / FILE
    if not file.exists():
        _write(folder, file)
    size = (task.size, task.size)
    if task.train:
        order = OrderOption.QUASI_RANDOM if beyond_memory else OrderOption.RANDOM
        decoder, flips = RandomResizedCropRGBImageDecoder(size), [RandomHorizontalFlip()] if task.flip else []
    else:
        order, decoder, flips = OrderOption.SEQUENTIAL, CenterCropRGBImageDecoder(size, CENTRE), []
    loader = Loader(
        str(file),
        batch_size=task.batch_size,
        num_workers=task.workers,
        order=order,
        os_cache=not beyond_memory,
        drop_last=False,
        pipelines={
            "image": [decoder, *flips, ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    return lambda _epoch: ((images.permute(0, 3, 1, 2), labels.flatten()) for images, labels in loader)


def pack(job: Job) -> None:
    """Pack a folder of photographs as "ffcv-jpg"."""
    _write_samples(Photographs(Path(job.source)), FIELDS["ffcv-jpg"], Path(job.out) / FILE, job.workers)


def _write(folder: Path, file: Path) -> None:
    corpus, kind, split = folder.parent.parent, folder.parent.name, folder.name
    source = Pixels(corpus / PIXELS / split) if kind.endswith(PIXELS) else Photographs(corpus / "images" / split)
    _write_samples(source, FIELDS[kind], file, workers=1)


def _write_samples(source: Sequence, settings: dict, file: Path, workers: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rgb_image.encode_jpeg = lambda image, quality: image.file  # its processes are forks of this one
    fields = {"image": RGBImageField(**settings), "label": IntField()}
    temporary = file.with_suffix(".tmp")
    DatasetWriter(str(temporary), fields, num_workers=workers).from_indexed_dataset(source)
    temporary.rename(file)
