"""Pixels of one size, cropped, resized and mirrored on the device: the processor only copies them.

Shapes: B samples, H and W pixels of the images, S pixels of the output, C channels.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from ..dataset import DataSet
from ..errors import DecodeError
from ..images.window import check_size
from .base import Batch
from .delivery import Delivery, Images
from .device import to_device
from .options import LoaderOptions
from .prefetch import PendingImage
from .threaded import ThreadedLoader


def fits(data_set: DataSet) -> bool:
    """Return whether all images are pixels, and of one size."""
    manifest = data_set.manifest
    return manifest.width is not None and manifest.height is not None and data_set.holds_pixels()


class Pixels(Images):
    """Slots with whole images, and what is cut out of each: `boxes` int32[B, 4] and `flips` bool[B]."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, count, images)
        self.boxes = np.zeros((len(positions), 4), np.int32)
        self.boxes[:, 2:] = 1
        self.flips = np.zeros(len(positions), bool)


class GpuPixelsLoader(ThreadedLoader[Pixels]):
    """The loader for `device="cuda"` and a data set that `fits`. See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(data_set, options)
        width, height = data_set.manifest.width, data_set.manifest.height
        if width is None or height is None:
            raise ValueError("the images have different sizes")
        self._device = device
        self._delivery = Delivery((options.batch_size, height, width, self.channels), device)

    def _new_slots(self, positions: np.ndarray, count: int) -> Pixels:
        return Pixels(positions, count, self._delivery.new_images())

    def _put(self, slots: Pixels, images: list[PendingImage]) -> dict[str, float]:
        began = time.perf_counter()
        for image in images:
            try:
                pixels = self.data_set.pixels(image.sample, image.data)
                check_size(pixels.shape[1], pixels.shape[0], image.size)  # numpy would repeat a single row
                slots.images[image.slot] = pixels
            except (ValueError, DecodeError) as error:
                self._take_bad(slots, image.slot, error)
                continue
            slots.boxes[image.slot] = image.box
            slots.flips[image.slot] = image.flip
        return {"copy": time.perf_counter() - began}

    def _put_nothing(self, slots: Pixels, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: Pixels) -> Batch:
        batch = self._delivery.deliver(slots)
        boxes, flips = (to_device(a, self._device) for a in (slots.boxes, slots.flips))
        images_BHWC = batch.images.permute(0, 2, 3, 1)
        images_BSSC = crop_resize_flip_batch(images_BHWC, boxes, flips, self.size)
        return Batch(images_BSSC.permute(0, 3, 1, 2), batch.labels, batch.samples, batch.valid)

    def _drain(self) -> None:
        self._delivery.drain()


def crop_resize_flip_batch(
    images_BHWC: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, size: int
) -> torch.Tensor:
    """Crop each image, resize its crop (antialiased bilinear), and mirror it if its flip says so.

    Both passes are matrix products, in half precision on a GPU; the result is within 1 of exact arithmetic there.

    Args:
        images_BHWC: uint8[B, H, W, C].
        boxes: int32[B, 4]: left, top, width and height of each crop in pixels. What lies beyond the image is black.
        flips: bool[B].
        size: S, pixels.

    Returns:
        uint8[B, S, S, C].
    """
    B, H, W, C = images_BHWC.shape
    dtype = torch.float16 if images_BHWC.is_cuda else torch.float32
    vertical_BSH = _weights(boxes[:, 1], boxes[:, 3], H, size).to(dtype)
    horizontal_BSW = _weights(boxes[:, 0], boxes[:, 2], W, size)
    horizontal_BSW = torch.where(flips[:, None, None], horizontal_BSW.flip(1), horizontal_BSW).to(dtype)
    rows_BSWC = torch.bmm(vertical_BSH, images_BHWC.reshape(B, H, W * C).to(dtype)).view(B, size, W, C)
    scaled_BSSC = torch.matmul(horizontal_BSW[:, None], rows_BSWC)
    return scaled_BSSC.float().round_().clamp_(0, 255).to(torch.uint8)


def _weights(start_B: torch.Tensor, length_B: torch.Tensor, pixels: int, size: int) -> torch.Tensor:
    """Compute what each pixel of a line contributes to each output.

    A triangle as wide as two outputs, at least two pixels, as torch.nn.functional.interpolate(antialias=True) has it.

    Args:
        start_B: int32[B], the crop's first pixel in the line.
        length_B: int32[B], the crop's length in pixels.
        pixels: The line's length.
        size: S, the number of outputs.

    Returns:
        float32[B, S, pixels]; each output's weights sum to 1, or are 0 where no pixel lies under it.
    """
    step = (length_B / size)[:, None, None]
    support = step.clamp(min=1)
    outputs = torch.arange(size, device=start_B.device)[None, :, None]
    places = torch.arange(pixels, device=start_B.device)[None, None, :]
    start, stop = start_B[:, None, None], (start_B + length_B)[:, None, None]
    centre = start + (outputs + 0.5) * step - 0.5
    weights = (1 - (places - centre).abs() / support).clamp(min=0)
    inside = (places >= start) & (places < stop)
    weights = weights * inside
    return weights / weights.sum(2, keepdim=True).clamp(min=1e-6)
