"""The `cpu` backend: threads read, cut out, decode and resize into batch memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..dataset import DataSet
from . import gpu_pixels
from .base import DataDescription, Loader
from .batch_slots import Images
from .blocks import BlockSource
from .delivery import HostDelivery
from .device import resolve_device
from .engine import Engine
from .image_chunk import PendingImage
from .indexed import IndexedSource, open_on
from .options import LoaderOptions
from .painter import Painter


def make_loader(path: Path | str, options: LoaderOptions, local: Path | None = None) -> Loader:
    """Open the data set at `path`, of which a copy arrives at `local`, and make its loader."""

    def make(data_set: DataSet) -> Loader:
        device = resolve_device(options.device)
        if device.type != "cpu" and gpu_pixels.fits(data_set):
            return gpu_pixels.make_pixels_loader(data_set, make_source(data_set, options), options, device)
        return make_cpu_loader(data_set, options)

    return open_on(path, options, make, local)


def make_cpu_loader(data_set: DataSet, options: LoaderOptions) -> Engine[Images]:
    """Make a loader of an open data set, which it closes, that decodes on the processor."""

    def decode_whole(image: PendingImage) -> np.ndarray:
        return data_set.pixels(image.sample, image.data)

    channels = data_set.manifest.channels
    painter = Painter[Images](channels, decode_whole, only_pixels=data_set.raw_shape is not None)
    shape = (options.batch_size, options.size, options.size, channels)
    delivery = HostDelivery(Images, shape, resolve_device(options.device))
    return Engine(DataDescription.from_data_set(data_set), options, make_source(data_set, options), painter, delivery)


def make_source(data_set: DataSet, options: LoaderOptions) -> IndexedSource:
    """Choose the source by the order."""
    return (BlockSource if options.order == "blocks" and options.train else IndexedSource)(data_set, options)
