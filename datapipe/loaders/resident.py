"""The `resident` backend: a data set of small images of one size, decoded once, that stays in the device's memory.

Batches are cut out there, so that neither the filesystem nor the processor has a part in a step. They are those of the
`cpu` backend, to the bit.

Shapes: N images of the data set, B samples, H and W pixels with the padding, S pixels of the output, C channels.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..errors import SettingError
from .base import DataDescription, Loader
from .batch import Batch
from .cpu import make_cpu_loader
from .device import resolve_device, to_device
from .indexed import open_for_loader
from .options import LoaderOptions

_FILL_BATCH = 1024  # images that are decoded at a time


def make_loader(path: Path | str, options: LoaderOptions, local: Path | None = None) -> Loader:
    """Decode the data set at `path`, of which a copy arrives at `local`, into the memory of a device."""
    options.refuse_other_than("images that are decoded once", order="full", io="cached")
    whole = replace(options, batch_size=_FILL_BATCH, train=False, rank=0, world_size=1, last="pad", device="cpu")
    with open_for_loader(path, whole, local) as data_set, closing(make_cpu_loader(data_set, whole)) as source:
        return ResidentLoader(DataDescription.from_data_set(data_set), source, options)


class ResidentLoader(Loader):
    """The loader of the `resident` backend. See `open_loader`.

    Args:
        data: The data set.
        source: Loader that gives all images once, in order.
        options: Options of the loader.

    Raises:
        SettingError: The images have not all the output's size, or the crop would scale them.
        DatapipeError: They cannot be read.
    """

    def __init__(self, data: DataDescription, source: Loader, options: LoaderOptions) -> None:
        super().__init__(data, options)
        if (data.width, data.height) != (self.size, self.size):
            sides = f"of {data.width}×{data.height}" if data.width and data.height else "of different sizes"
            raise SettingError(
                f"size: {self.size} with images {sides}, which backend 'resident' does not scale: give the size of the "
                "images (in a recipe, data.size), or another backend (data.backend)"
            )
        if options.train and self._augment.crop == "random_resized":
            raise SettingError("crop: 'random_resized' scales images, and backend 'resident' none; allowed: pad, none")
        self._device = device = resolve_device(options.device)
        # A crop may reach so far beyond an image.
        self._pad = self._augment.pad if options.train and self._augment.crop == "pad" else 0
        side = self.size + 2 * self._pad
        shape = (self.num_samples, side, side, self.channels)
        images_NHWC = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._labels = torch.empty(self.num_samples, dtype=torch.int64, device=device)
        self._valid = torch.empty(self.num_samples, dtype=torch.bool, device=device)
        inside = slice(self._pad, self._pad + self.size)
        for number, batch in enumerate(source):
            first, count = number * _FILL_BATCH, min(_FILL_BATCH, self.num_samples - number * _FILL_BATCH)
            rows = slice(first, first + count)
            images_NHWC[rows, inside, inside] = batch.images[:count].permute(0, 2, 3, 1).to(device)
            self._labels[rows], self._valid[rows] = batch.labels[:count].to(device), batch.valid[:count].to(device)
        self._images_NHWC = images_NHWC
        # [N, top, left, C, S, S]: all crops of all images, which take no memory of their own.
        self._crops_of = images_NHWC.unfold(1, self.size, 1).unfold(2, self.size, 1)

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        order = self.full_order(epoch)
        for step in steps:
            positions = self.positions(step)
            positions = positions[positions < self.num_samples]
            yield self._batch(epoch, positions, order[positions])

    def _batch(self, epoch: int, positions: np.ndarray, samples: np.ndarray) -> Batch:
        """Cut out the samples at some positions of an epoch; what is missing of a batch is padding."""
        count = len(samples)
        columns = np.zeros((self.options.batch_size, 4), np.int64)
        if count:
            side = np.full(count, self.size)
            boxes, flips = self.crops(epoch, positions, samples, side, side)
            columns[:count] = np.column_stack([samples, boxes[:, 1] + self._pad, boxes[:, 0] + self._pad, flips])
        rows, tops, lefts, mirrored = to_device(columns, self._device).unbind(1)  # one copy
        if self._pad:
            images_BCSS = self._crops_of[rows, tops, lefts]
        else:  # whole images, which are copied in one piece each
            images_BCSS = self._images_NHWC.index_select(0, rows).permute(0, 3, 1, 2)
        if columns[:, 3].any():
            images_BCSS = torch.where(mirrored.bool()[:, None, None, None], images_BCSS.flip(-1), images_BCSS)
        batch = Batch(images_BCSS, self._labels[rows], rows, self._valid[rows])
        if count < len(columns):
            for tensor, nothing in ((batch.images, 0), (batch.labels, 0), (batch.samples, -1), (batch.valid, False)):
                tensor[count:] = nothing
        return batch

    def _take_size(self, size: int) -> None:
        raise SettingError(f"size: {size} is not that of the images, and backend 'resident' scales none")
