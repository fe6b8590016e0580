"""Decoding, cropping, resizing and mirroring images into the slots of a batch, on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np

from ..errors import DecodeError
from ..images import window
from ..images.jpeg import is_jpeg
from ..images.window import Decoded, Window, check_size, decode_window
from .batch_slots import ImageSlots
from .decoder import Decoder
from .image_chunk import ImageChunk, PendingImage
from .native_pixels import choose_native, decode_in_c
from .resize import crop_resize_flip

_PIXEL_BYTES = 8 << 20  # of memory for decoded pixels per thread: about 16 windows
_CROP_BYTES = 1 << 20  # of memory for the pixels of one crop


class Painter(Decoder[ImageSlots]):
    """Decodes images into the slots of a batch: in C as far as that takes them, and by libraries."""

    def __init__(self) -> None:
        self._library = choose_native().native
        self._local = threading.local()

    def put(self, slots: ImageSlots, chunk: ImageChunk) -> dict[str, float]:
        """Put images into their slots; return the seconds of each stage.

        Stage by stage for all of them: Python between two decodes would find the processor's caches full of pixels,
        and take longer.
        """
        clock = time.perf_counter
        left, spent_s = list(range(len(chunk.slots))), {"read": 0.0}
        if self._library is not None:
            left, spent_s = decode_in_c(self._library, slots, chunk)
            if not left:
                return spent_s
        began = clock()
        images = list(chunk.pending(left, slots))
        spent_s["read"] += clock() - began
        began = clock()
        if not hasattr(self._local, "pixels"):
            self._local.pixels = memoryview(bytearray(_PIXEL_BYTES))
            self._local.crop = np.empty(_CROP_BYTES, np.uint8)
        pending, crop_memory = iter(_cut_windows(chunk, images)), self._local.crop
        stage_s = {"decode": 0.0, "resize": 0.0, **spent_s, "window": clock() - began}
        while True:
            began = clock()
            decoded = self._decode_some(slots, chunk, pending)
            middle = clock()
            for image, (pixels, box) in decoded:
                crop_resize_flip(pixels, box, image.flip, slots.images[image.slot], crop_memory)
            stage_s["decode"] += middle - began
            stage_s["resize"] += clock() - middle
            if not decoded:
                return stage_s

    def _decode_some(
        self, slots: ImageSlots, chunk: ImageChunk, pending: Iterator[tuple[PendingImage, Window | None]]
    ) -> list[tuple[PendingImage, Decoded]]:
        """Decode the next images, as many as fit into this thread's memory for pixels."""
        memory, decoded, channels = self._local.pixels, [], slots.images.shape[3]
        for image, its_window in pending:
            if slots.abandoned:
                return []
            try:
                if its_window is None:
                    pixels = chunk.decode(image, channels)
                    check_size(pixels.shape[1], pixels.shape[0], image.size)
                    decoded.append((image, Decoded(pixels, image.box)))
                else:
                    part = decode_window(image.data, its_window, image.box, channels, image.scale, memory)
                    decoded.append((image, part))
                    memory = memory[part.pixels.size :]
            except (ValueError, DecodeError) as error:
                chunk.bad[image.slot] = error
            if len(memory) < _PIXEL_BYTES // 4:
                break
        return decoded


def _cut_windows(chunk: ImageChunk, images: list[PendingImage]) -> list[tuple[PendingImage, Window | None]]:
    """Cut out what has to be decoded of each JPEG; None for other images."""
    windows = []
    for image in images:
        try:
            is_cut = not chunk.only_pixels and is_jpeg(image.data)
            windows.append((image, window.cut(image.data, image.box, image.size) if is_cut else None))
        except ValueError as error:
            chunk.bad[image.slot] = error
    return windows
