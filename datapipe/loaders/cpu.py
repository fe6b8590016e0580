"""The `cpu` backend: threads read, cut out, decode and resize into batch memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet
from ..errors import DecodeError
from ..images import window
from ..images.jpeg import is_jpeg
from ..images.window import Box, Decoded, Window, check_size, decode_window
from .base import Batch, LoaderOptions, device_of
from .batch_memory import BatchMemory
from .threaded import FillingLoader, Slots, Wanted
from .threads import in_time

PIXEL_BYTES = 8 << 20  # of memory for decoded pixels a thread: about 16 windows
WINDOW_BYTES = 1 << 20  # of memory for one of them, cut out


def open(path: Path | str, options: LoaderOptions, device: object) -> FillingLoader:
    from . import gpu_pixels

    data_set = in_time(options.timeout_s, path, "opening the data set", DataSet, path, options.io, options.retries)
    device = device_of(device)
    try:
        if device.type != "cpu" and gpu_pixels.fits(data_set):
            return gpu_pixels.RawLoader(data_set, options, device)
        return CpuLoader(data_set, options, device)
    except BaseException:
        data_set.close()
        raise


class Images(Slots):
    """With the images' memory: uint8[B, H, W, C]."""

    images: np.ndarray


class Painter:
    """Decodes images into the slots of a batch. `bad(slots, slot, error)` is called for what cannot be decoded.

    `plain`: the images are nothing but pixels, which may look like the first bytes of a JPEG.
    """

    def __init__(
        self, channels: int, pixels: Callable[[Wanted], np.ndarray], bad: Callable, plain: bool = False
    ) -> None:
        self._channels, self._pixels, self._bad, self._plain = channels, pixels, bad, plain
        self._local = threading.local()

    def put(self, slots: Images, wanted: list[Wanted]) -> dict[str, float]:
        """Returns the seconds of each stage.

        Stage by stage for all of them: Python between two decodes would find the processor's caches full of pixels,
        and take longer.
        """
        clock = time.perf_counter
        began = clock()
        if not hasattr(self._local, "room"):
            self._local.room = memoryview(bytearray(PIXEL_BYTES))
            self._local.window = np.empty(WINDOW_BYTES, np.uint8)
        left, room = iter(self._cut(slots, wanted)), self._local.window
        spent = {"window": clock() - began, "decode": 0.0, "resize": 0.0}
        while True:
            began = clock()
            decoded = self._decode(slots, left)
            middle = clock()
            for one, (pixels, box) in decoded:
                cut(pixels, box, one.flip, slots.images[one.slot], room)
            spent["decode"] += middle - began
            spent["resize"] += clock() - middle
            if not decoded:
                return spent

    def _cut(self, slots: Images, wanted: list[Wanted]) -> list[tuple[Wanted, Window | None]]:
        """What has to be decoded of each JPEG; None for other images."""
        found = []
        for one in wanted:
            try:
                cuttable = not self._plain and is_jpeg(one.data)
                found.append((one, window.cut(one.data, one.box, one.size) if cuttable else None))
            except ValueError as error:
                self._bad(slots, one.slot, error)
        return found

    def _decode(self, slots: Images, left: Iterator[tuple[Wanted, Window | None]]) -> list[tuple[Wanted, Decoded]]:
        """The next images, as many as fit into this thread's memory for pixels."""
        room, decoded = self._local.room, []
        for one, found in left:
            if slots.abandoned:
                return []
            try:
                if found is None:
                    pixels = self._pixels(one)
                    check_size(pixels.shape[1], pixels.shape[0], one.size)
                    decoded.append((one, Decoded(pixels, one.box)))
                else:
                    decoded.append((one, decode_window(one.data, found, one.box, self._channels, one.scale, room)))
                    room = room[decoded[-1][1].pixels.size :]
            except (ValueError, DecodeError) as error:
                self._bad(slots, one.slot, error)
            if len(room) < PIXEL_BYTES // 4:
                break
        return decoded


class Delivery:
    """Batches from host memory, on the device if there is one."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self.memory = BatchMemory(shape, pinned=self._device is not None)
        self._on_device: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def batch(self, slots: Images) -> Batch:
        images, *rest = (torch.from_numpy(a) for a in (slots.images, slots.labels, slots.samples, slots.valid))
        batch = Batch(images.permute(0, 3, 1, 2), *rest)
        return batch if self._device is None else self._copied(batch)

    def _copied(self, batch: Batch) -> Batch:
        """Copy to the device without waiting; the host's memory is kept until the copy is done."""
        delivered = batch.to(self._device)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._on_device.append((event, batch))
        while self._on_device[0][0].query() and len(self._on_device) > 1:
            self._on_device.popleft()
        return delivered

    def drain(self) -> None:
        """Wait until nothing is being copied: memory may be used again."""
        for event, _ in self._on_device:
            event.synchronize()
        self._on_device.clear()


class CpuLoader(FillingLoader):
    """See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(data_set, options)
        self._delivery = Delivery((options.batch_size, self.size, self.size, self.channels), device)
        plain = data_set.raw_shape is not None
        self._painter = Painter(self.channels, lambda one: data_set.pixels(one.sample, one.data), self._take_bad, plain)

    def _new_slots(self, positions: np.ndarray, samples: np.ndarray) -> Images:
        slots = Images(positions, samples)
        slots.images = self._delivery.memory.take()
        return slots

    def _put(self, slots: Images, wanted: list[Wanted]) -> dict[str, float]:
        return self._painter.put(slots, wanted)

    def _put_nothing(self, slots: Images, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: Images) -> Batch:
        return self._delivery.batch(slots)

    def _drain(self, begun: Collection[Slots]) -> None:
        self._delivery.drain()


def cut(pixels: np.ndarray, box: Box, flip: bool, out: np.ndarray, room: np.ndarray | None = None) -> None:
    """Cut a window, scale it to the output's size (antialiased bilinear), mirror it if told.

    `pixels` uint8[H, W, C]; `box` left, top, width, height, where beyond the image is black; `out` uint8[S, S, C] is
    written; `room` uint8[bytes] holds the window meanwhile, if it is large enough.
    """
    left, top, width, height = box
    side = out.shape[0]
    if width == height == side:
        if flip:
            out = out[:, ::-1]
        inside_x, inside_y = slice(max(0, left), max(0, left + width)), slice(max(0, top), max(0, top + height))
        part = pixels[inside_y, inside_x]
        if part.shape != out.shape:
            out[:] = 0
            y, x = min(side, max(0, -top)), min(side, max(0, -left))
            out = out[y : y + part.shape[0], x : x + part.shape[1]]
        out[:] = part
        return
    part = pixels[top : top + height, left : left + width]
    # In one piece: torch 2.13 gives wrong pixels for a view one pixel wide, and would copy any other.
    fits = room is not None and part.size <= room.size
    window = room[: part.size].reshape(part.shape) if fits else np.empty(part.shape, np.uint8)
    window[:] = part
    planes, slot = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (window, out))
    # What torch.nn.functional.interpolate calls, but straight into the slot: its own result has planes,
    # and to turn those into pixels takes longer than to scale them.
    torch.ops.aten._upsample_bilinear2d_aa.out(planes, [side, side], False, None, None, out=slot)
    if flip:
        slot.copy_(slot.flip(-1))
