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
from .base import DataDescription
from .batch import Batch
from .batch_slots import Images
from .delivery import HostDelivery
from .device import to_device
from .engine import Decoder, Engine
from .image_chunk import ImageChunk
from .indexed import IndexedSource
from .options import LoaderOptions


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


def make_pixels_loader(
    data_set: DataSet, source: IndexedSource, options: LoaderOptions, device: torch.device
) -> Engine[Pixels]:
    """Make a loader that leaves all but copying to the device.

    Args:
        data_set: Data set that `fits`.
        source: Source of its samples.
        options: Options of the loader.
        device: Device to which batches are delivered.

    Returns:
        The loader.
    """
    delivery = CutOnDevice(data_set, options, device)
    return Engine(DataDescription.from_data_set(data_set), options, source, PixelCopier(), delivery)


class PixelCopier(Decoder[Pixels]):
    """Copies pixels as they are stored."""

    def put(self, slots: Pixels, chunk: ImageChunk) -> dict[str, float]:
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


class CutOnDevice(HostDelivery[Pixels]):
    """Whole images, which the device cuts out of.

    Args:
        data_set: Data set that `fits`.
        options: Options of the loader.
        device: Device to which batches are delivered.
    """

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        width, height = data_set.manifest.width, data_set.manifest.height
        if width is None or height is None:
            raise ValueError("the images have different sizes")
        super().__init__(Pixels, (options.batch_size, height, width, data_set.manifest.channels), device)
        self._place = device

    def set_size(self, size: int) -> None:
        """Leave the memory as it is: whole images are in it."""

    def finish(self, slots: Pixels, engine: Engine[Pixels]) -> Batch:
        batch = super().finish(slots, engine)
        boxes, flips = (to_device(a, self._place) for a in (slots.boxes, slots.flips))
        images_BHWC = batch.images.permute(0, 2, 3, 1)
        images_BSSC = crop_resize_flip_batch(images_BHWC, boxes, flips, engine.size)
        return Batch(images_BSSC.permute(0, 3, 1, 2), batch.labels, batch.samples, batch.valid)


def crop_resize_flip_batch(
    images_BHWC: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, size: int
) -> torch.Tensor:
    """Crop each image, resize its crop (antialiased bilinear), and mirror it if its flip says so.

    Both passes are matrix products, in half precision on a GPU; the result is within 1 of exact arithmetic there.

    Args:
        images_BHWC: Images, uint8[B, H, W, C].
        boxes: Crops, int32[B, 4]: left, top, width and height of each crop in pixels. What lies beyond the image is
            black.
        flips: Whether to mirror each image, bool[B].
        size: Width and height of the results in pixels, S.

    Returns:
        The results, uint8[B, S, S, C].
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
        start_B: First pixel of each crop in the line, int32[B].
        length_B: Length of each crop in pixels, int32[B].
        pixels: Length of the line, in pixels.
        size: Number of outputs, S.

    Returns:
        The weights, float32[B, S, pixels]; each output's weights sum to 1, or are 0 if no pixel lies under it.
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
