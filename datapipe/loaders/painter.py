"""Decoding, cropping, resizing and mirroring images into the slots of a batch, on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from ..errors import DecodeError
from ..images import window
from ..images.jpeg import is_jpeg
from ..images.window import Decoded, Window, check_size, decode_window
from .batch_slots import Images
from .engine import Decoder, TakeBad
from .image_chunk import ImageChunk, PendingImage
from .native_pixels import NativePixels, choose_native
from .resize import crop_resize_flip

PIXEL_BYTES = 8 << 20  # of memory for decoded pixels per thread: about 16 windows
CROP_BYTES = 1 << 20  # of memory for the pixels of one crop

ImagesT = TypeVar("ImagesT", bound=Images)


class Painter(Decoder[ImagesT]):
    """Decodes images into the slots of a batch.

    Args:
        channels: Channels of the images, 1 or 3.
        decode_whole: Function that decodes an image that is not a JPEG: uint8[H, W, C].
        only_pixels: Whether the images are nothing but pixels, which may look like the first bytes of a JPEG.
    """

    def __init__(
        self,
        channels: int,
        decode_whole: Callable[[PendingImage], np.ndarray],
        only_pixels: bool = False,
    ) -> None:
        self._channels, self._decode_whole = channels, decode_whole
        self._only_pixels = only_pixels
        library = choose_native().native
        self._native = NativePixels(library, channels, only_pixels) if library else None
        self._local = threading.local()

    def put(self, slots: ImagesT, chunk: ImageChunk, take_bad: TakeBad) -> dict[str, float]:
        """Put images into their slots; return the seconds of each stage.

        Stage by stage for all of them: Python between two decodes would find the processor's caches full of pixels,
        and take longer.
        """
        clock = time.perf_counter
        left, spent_s = list(range(len(chunk.slots))), {"read": 0.0}
        if self._native is not None:
            left, spent_s = self._native.put(slots, chunk)
            if not left:
                return spent_s
        began = clock()
        images = list(chunk.pending(left, slots, take_bad))
        spent_s["read"] += clock() - began
        began = clock()
        if not hasattr(self._local, "pixels"):
            self._local.pixels = memoryview(bytearray(PIXEL_BYTES))
            self._local.crop = np.empty(CROP_BYTES, np.uint8)
        pending, crop_memory = iter(self._cut_windows(images, take_bad)), self._local.crop
        stage_s = {"decode": 0.0, "resize": 0.0, **spent_s, "window": clock() - began}
        while True:
            began = clock()
            decoded = self._decode_some(slots, pending, take_bad)
            middle = clock()
            for image, (pixels, box) in decoded:
                crop_resize_flip(pixels, box, image.flip, slots.images[image.slot], crop_memory)
            stage_s["decode"] += middle - began
            stage_s["resize"] += clock() - middle
            if not decoded:
                return stage_s

    def _cut_windows(self, images: list[PendingImage], take_bad: TakeBad) -> list[tuple[PendingImage, Window | None]]:
        """Cut out what has to be decoded of each JPEG; None for other images."""
        windows = []
        for image in images:
            try:
                is_cut = not self._only_pixels and is_jpeg(image.data)
                windows.append((image, window.cut(image.data, image.box, image.size) if is_cut else None))
            except ValueError as error:
                take_bad(image.slot, error)
        return windows

    def _decode_some(
        self, slots: ImagesT, pending: Iterator[tuple[PendingImage, Window | None]], take_bad: TakeBad
    ) -> list[tuple[PendingImage, Decoded]]:
        """Decode the next images, as many as fit into this thread's memory for pixels."""
        memory, decoded = self._local.pixels, []
        for image, its_window in pending:
            if slots.abandoned:
                return []
            try:
                if its_window is None:
                    pixels = self._decode_whole(image)
                    check_size(pixels.shape[1], pixels.shape[0], image.size)
                    decoded.append((image, Decoded(pixels, image.box)))
                else:
                    part = decode_window(image.data, its_window, image.box, self._channels, image.scale, memory)
                    decoded.append((image, part))
                    memory = memory[part.pixels.size :]
            except (ValueError, DecodeError) as error:
                take_bad(image.slot, error)
            if len(memory) < PIXEL_BYTES // 4:
                break
        return decoded
