"""The `cpu` backend: threads read, cut out, decode and resize into batch memory.

Of stored pixels of one size they only copy them, if batches are delivered to a GPU, which crops, resizes and mirrors.

Shapes: B samples, H and W pixels of the images, S pixels of the output, C channels.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ..dataset import DataSet
from ..errors import DecodeError
from ..images.window import check_size
from .base import DataDescription, Loader
from .batch import Batch
from .batch_slots import ImageSlots
from .blocks import BlockSource
from .decoder import Decoder
from .delivery import HostDelivery
from .device import resolve_device, to_device
from .engine import Engine, SampleSource
from .image_chunk import ImageChunk
from .indexed import IndexedSource, open_for_loader
from .options import LoaderOptions
from .painter import Painter
from .resize import crop_resize_flip_batch


def make_loader(path: Path | str, options: LoaderOptions, local: Path | None = None) -> Loader:
    """Open the data set at `path`, of which a copy arrives at `local`, and make its loader."""
    with open_for_loader(path, options, local) as data_set:
        if resolve_device(options.device).type != "cpu" and holds_pixels_of_one_size(data_set):
            return make_pixels_loader(data_set, options)
        return make_cpu_loader(data_set, options)


def make_cpu_loader(data_set: DataSet, options: LoaderOptions) -> Engine[ImageSlots]:
    """Make a loader of an open data set, which it closes, that decodes on the processor."""
    return make_decoding_loader(DataDescription.from_data_set(data_set), options, make_source(data_set, options))


def make_decoding_loader(data: DataDescription, options: LoaderOptions, source: SampleSource) -> Engine[ImageSlots]:
    """Make a loader that decodes on the processor.

    Args:
        data: The data set.
        options: Options of the loader.
        source: SampleSource of its samples, which the loader closes.

    Returns:
        The loader.
    """
    shape = (options.batch_size, options.size, options.size, data.channels)
    return Engine(data, options, source, Painter(), HostDelivery(ImageSlots, shape, resolve_device(options.device)))


def make_pixels_loader(data_set: DataSet, options: LoaderOptions) -> Engine[WholeImageSlots]:
    """Make a loader of an open data set, which it closes, that leaves all but copying to the device."""
    delivery, data = CutOnDevice(data_set, options), DataDescription.from_data_set(data_set)
    return Engine(data, options, make_source(data_set, options), PixelCopier(), delivery)


def make_source(data_set: DataSet, options: LoaderOptions) -> IndexedSource:
    """Choose the source by the order."""
    return (BlockSource if options.order == "blocks" and options.train else IndexedSource)(data_set, options)


def holds_pixels_of_one_size(data_set: DataSet) -> bool:
    """Return whether all images are pixels, and of one size."""
    manifest = data_set.manifest
    return manifest.width is not None and manifest.height is not None and data_set.holds_pixels()


class WholeImageSlots(ImageSlots):
    """Slots with whole images, and what is cut out of each: `boxes` int32[B, 4] and `flips` bool[B]."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, count, images)
        self.boxes = np.zeros((len(positions), 4), np.int32)
        self.boxes[:, 2:] = 1
        self.flips = np.zeros(len(positions), bool)


class PixelCopier(Decoder[WholeImageSlots]):
    """Copies pixels as they are stored."""

    def put(self, slots: WholeImageSlots, chunk: ImageChunk) -> dict[str, float]:
        began = time.perf_counter()
        for image in chunk.pending(range(len(chunk.slots)), slots):
            try:
                pixels = chunk.decode(image, slots.images.shape[3])
                check_size(pixels.shape[1], pixels.shape[0], image.size)  # numpy would repeat a single row
                slots.images[image.slot] = pixels
            except (ValueError, DecodeError) as error:
                chunk.bad[image.slot] = error
                continue
            slots.boxes[image.slot] = image.box
            slots.flips[image.slot] = image.flip
        return {"copy": time.perf_counter() - began}


class CutOnDevice(HostDelivery[WholeImageSlots]):
    """Whole images of one size, which the device cuts out of."""

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        width, height = data_set.manifest.width, data_set.manifest.height
        if width is None or height is None:
            raise ValueError("the images have different sizes")
        shape = (options.batch_size, height, width, data_set.manifest.channels)
        super().__init__(WholeImageSlots, shape, resolve_device(options.device))

    def set_size(self, size: int) -> None:
        """Leave the memory as it is: whole images are in it."""

    def finish(self, slots: WholeImageSlots, engine: Engine[WholeImageSlots]) -> Batch:
        batch = super().finish(slots, engine)
        boxes, flips = (to_device(a, batch.images.device) for a in (slots.boxes, slots.flips))
        images_BHWC = batch.images.permute(0, 2, 3, 1)
        images_BSSC = crop_resize_flip_batch(images_BHWC, boxes, flips, engine.size)
        return Batch(images_BSSC.permute(0, 3, 1, 2), batch.labels, batch.samples, batch.valid)
