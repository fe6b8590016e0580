"""The `cpu` backend: threads read, cut out, decode and resize into batch memory."""

from __future__ import annotations

from pathlib import Path

from ..dataset import DataSet
from . import gpu_pixels
from .base import DataDescription, Loader
from .batch_slots import Images
from .blocks import BlockSource
from .delivery import HostDelivery
from .device import resolve_device
from .engine import Engine
from .indexed import IndexedSource, open_for_loader
from .options import LoaderOptions
from .painter import Painter


def make_loader(path: Path | str, options: LoaderOptions, local: Path | None = None) -> Loader:
    """Open the data set at `path`, of which a copy arrives at `local`, and make its loader."""
    with open_for_loader(path, options, local) as data_set:
        device = resolve_device(options.device)
        if device.type != "cpu" and gpu_pixels.fits(data_set):
            return gpu_pixels.make_pixels_loader(data_set, make_source(data_set, options), options, device)
        return make_cpu_loader(data_set, options)


def make_cpu_loader(data_set: DataSet, options: LoaderOptions) -> Engine[Images]:
    """Make a loader of an open data set, which it closes, that decodes on the processor."""
    shape = (options.batch_size, options.size, options.size, data_set.manifest.channels)
    delivery = HostDelivery(Images, shape, resolve_device(options.device))
    return Engine(DataDescription.from_data_set(data_set), options, make_source(data_set, options), Painter(), delivery)


def make_source(data_set: DataSet, options: LoaderOptions) -> IndexedSource:
    """Choose the source by the order."""
    return (BlockSource if options.order == "blocks" and options.train else IndexedSource)(data_set, options)
