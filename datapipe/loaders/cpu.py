"""The `cpu` backend: threads read, cut out, decode and resize into batch memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet
from . import gpu_pixels
from .base import Batch, Loader
from .delivery import Delivery, Images
from .device import resolve_device
from .options import LoaderOptions
from .painter import Painter
from .prefetch import PendingImage
from .threaded import ThreadedLoader, open_on


def make_loader(
    path: Path | str, options: LoaderOptions, device: torch.device | str | int | None, local: Path | None = None
) -> Loader:
    """Open the data set at `path`, of which a copy arrives at `local`, and make a loader that delivers to `device`."""

    def make(data_set: DataSet) -> Loader:
        place = resolve_device(device)
        if place.type != "cpu" and gpu_pixels.fits(data_set):
            return gpu_pixels.GpuPixelsLoader(data_set, options, place)
        return CpuLoader(data_set, options, place)

    return open_on(path, options, make, local)


class CpuLoader(ThreadedLoader[Images]):
    """The loader of the `cpu` backend. See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(data_set, options)
        self._device = device
        self._delivery = self._new_delivery()
        only_pixels = data_set.raw_shape is not None
        self._painter = Painter[Images](self.channels, self._decode_whole, self._take_bad, only_pixels)

    def _decode_whole(self, image: PendingImage) -> np.ndarray:
        return self.data_set.pixels(image.sample, image.data)

    def _new_slots(self, positions: np.ndarray, count: int) -> Images:
        return Images(positions, count, self._delivery.new_images())

    def _put(self, slots: Images, images: list[PendingImage]) -> dict[str, float]:
        return self._painter.put(slots, images)

    def _put_nothing(self, slots: Images, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: Images) -> Batch:
        return self._delivery.deliver(slots)

    def _take_size(self, size: int) -> None:
        super()._take_size(size)
        self._delivery = self._new_delivery()

    def _new_delivery(self) -> Delivery:
        return Delivery((self.options.batch_size, self.size, self.size, self.channels), self._device)

    def _drain(self) -> None:
        self._delivery.drain()
