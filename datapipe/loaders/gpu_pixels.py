"""Pixels of one size, cut, scaled and mirrored on the device: the processor only copies them.

B samples, H and W pixels of an image, S pixels of the output, C channels
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
import torch

from ..dataset import DataSet
from ..errors import DecodeError
from ..images.window import check_size
from .base import Batch, LoaderOptions
from .cpu import Delivery, Images
from .threaded import FillingLoader, Slots, Wanted


def fits(data_set: DataSet) -> bool:
    """Are all images pixels, and of one size?"""
    manifest = data_set.manifest
    return manifest.width is not None and manifest.height is not None and data_set.holds_pixels()


class RawLoader(FillingLoader):
    """For `device="cuda"` and a data set that `fits`. See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(data_set, options)
        manifest = data_set.manifest
        self._device = device
        self._delivery = Delivery((options.batch_size, manifest.height, manifest.width, self.channels), device)

    def _new_slots(self, positions: np.ndarray, samples: np.ndarray) -> _Pixels:
        slots = _Pixels(positions, samples)
        slots.images = self._delivery.memory.take()
        slots.boxes = np.zeros((len(positions), 4), np.int32)
        slots.boxes[:, 2:] = 1
        slots.flips = np.zeros(len(positions), bool)
        return slots

    def _put(self, slots: _Pixels, wanted: list[Wanted]) -> dict[str, float]:
        began = time.perf_counter()
        for one in wanted:
            try:
                pixels = self.data_set.pixels(one.sample, one.data)
                check_size(pixels.shape[1], pixels.shape[0], one.size)  # numpy would repeat a single row
                slots.images[one.slot] = pixels
            except (ValueError, DecodeError) as error:
                self._take_bad(slots, one.slot, error)
                continue
            slots.boxes[one.slot] = one.box
            slots.flips[one.slot] = one.flip
        return {"copy": time.perf_counter() - began}

    def _put_nothing(self, slots: _Pixels, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: _Pixels) -> Batch:
        batch = self._delivery.batch(slots)
        boxes, flips = (torch.from_numpy(a).to(self._device) for a in (slots.boxes, slots.flips))
        images_BHWC = batch.images.permute(0, 2, 3, 1)
        images_BSSC = cut_and_scale(images_BHWC, boxes, flips, self.size)
        return Batch(images_BSSC.permute(0, 3, 1, 2), batch.labels, batch.samples, batch.valid)

    def _drain(self, begun: Collection[Slots]) -> None:
        self._delivery.drain()


class _Pixels(Images):
    """With `boxes` int32[B, 4] and `flips` bool[B]."""

    boxes: np.ndarray
    flips: np.ndarray


def cut_and_scale(images_BHWC: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, size: int) -> torch.Tensor:
    """Of each image (uint8) its box (left, top, width, height), scaled to `size` (antialiased bilinear), mirrored where
    `flips`: uint8[B, S, S, C]. What of a box lies beyond its image is black.

    Both passes are matrix products, in half precision on a GPU; the result is within 1 of exact arithmetic there.
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
    """float32[B, S, pixels]: what each pixel of a line contributes to each output.

    A triangle as wide as two outputs, at least two pixels, as torch.nn.functional.interpolate(antialias=True) has it.
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
