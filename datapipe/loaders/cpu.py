"""The `cpu` backend: threads read, cut out, decode and resize into batch memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch

from .. import window
from ..dataset import DataSet
from ..errors import DecodeError
from ..jpeg import is_jpeg
from ..window import Box, Decoded, Window, decode_window
from .base import Batch, LoaderOptions
from .filling import FillingLoader, Slots, Wanted
from .memory import BatchMemory

PIXEL_BYTES = 8 << 20  # of memory for decoded pixels a thread: about 16 windows
BAD = Window(b"", 0, 0, 0, 0)


def open(path: Path, options: LoaderOptions, device: object) -> CpuLoader:
    data_set = DataSet(path, options.io, options.retries)
    try:
        return CpuLoader(data_set, options, torch.device(device) if device is not None else None)
    except BaseException:
        data_set.close()
        raise


class _Images(Slots):
    images: np.ndarray  # uint8[B, H, W, C]


class CpuLoader(FillingLoader):
    """See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device | None) -> None:
        super().__init__(data_set, options)
        self._device = None if device is None or device.type == "cpu" else device
        shape = (options.batch_size, self.size, self.size, self.channels)
        self._memory = BatchMemory(shape, pinned=self._device is not None)
        self._on_device: deque[tuple[torch.cuda.Event, Batch]] = deque()
        self._local = threading.local()

    def _new_slots(self, positions: np.ndarray, samples: np.ndarray) -> _Images:
        slots = _Images(positions, samples)
        slots.images = self._memory.take()
        return slots

    def _put(self, slots: _Images, wanted: list[Wanted]) -> dict[str, float]:
        clock = time.perf_counter
        began = clock()
        windows = self._windows_of(slots, wanted)
        spent = {"window": clock() - began, "decode": 0.0, "resize": 0.0}
        left = iter(zip(wanted, windows, strict=True))
        while True:
            began = clock()
            decoded = self._decode(slots, left)
            middle = clock()
            for one, (pixels, box) in decoded:
                cut(pixels, box, one.flip, slots.images[one.slot])
            spent["decode"] += middle - began
            spent["resize"] += clock() - middle
            if not decoded:
                return spent

    def _windows_of(self, slots: _Images, wanted: list[Wanted]) -> list[Window | None]:
        """What has to be decoded of each JPEG; None for other images, and for bad ones."""
        windows = []
        for one in wanted:
            try:
                windows.append(window.cut(one.data, one.box) if is_jpeg(one.data) else None)
            except ValueError as error:
                self._take_bad(slots, one.slot, error)
                windows.append(BAD)
        return windows

    def _decode(self, slots: _Images, left: Iterator[tuple[Wanted, Window | None]]) -> list[tuple[Wanted, Decoded]]:
        """The next images, as many as fit into this thread's memory for pixels."""
        try:
            room = self._local.room
        except AttributeError:
            room = self._local.room = memoryview(bytearray(PIXEL_BYTES))
        decoded = []
        for one, found in left:
            if slots.abandoned:
                return []
            try:
                if found is None:
                    pixels = self.data_set.pixels(one.sample, one.data)
                    decoded.append((one, Decoded(pixels, one.box)))
                elif found is not BAD:
                    decoded.append((one, decode_window(one.data, found, one.box, self.channels, one.scale, room)))
                    room = room[decoded[-1][1].pixels.size :]
            except (ValueError, DecodeError) as error:
                self._take_bad(slots, one.slot, error)
            if len(room) < PIXEL_BYTES // 4:
                break
        return decoded

    def _put_nothing(self, slots: _Images, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: _Images) -> Batch:
        images, *rest = (torch.from_numpy(a) for a in (slots.images, slots.labels, slots.samples, slots.valid))
        batch = Batch(images.permute(0, 3, 1, 2), *rest)
        return batch if self._device is None else self._deliver(batch)

    def _deliver(self, batch: Batch) -> Batch:
        """Copy to the device without waiting; the host's memory is kept until the copy is done."""
        delivered = batch.to(self._device)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._on_device.append((event, batch))
        while self._on_device[0][0].query() and len(self._on_device) > 1:
            self._on_device.popleft()
        return delivered

    def _drain(self, begun: Collection[Slots]) -> None:
        for event, _ in self._on_device:
            event.synchronize()
        self._on_device.clear()


def cut(pixels: np.ndarray, box: Box, flip: bool, out: np.ndarray) -> None:
    """Cut a window, scale it to the output's size (antialiased bilinear), mirror it if told.

    `pixels` uint8[H, W, C]; `box` left, top, width, height, where beyond the image is black; `out`
    uint8[S, S, C] is written.
    """
    left, top, width, height = box
    side = out.shape[0]
    if width == height == side:
        if flip:
            out = out[:, ::-1]
        inside_x, inside_y = slice(max(0, left), left + width), slice(max(0, top), top + height)
        part = pixels[inside_y, inside_x]
        if part.shape != out.shape:
            out[:] = 0
            y, x = max(0, -top), max(0, -left)
            out = out[y : y + part.shape[0], x : x + part.shape[1]]
        out[:] = part
        return
    window = np.require(pixels[top : top + height, left : left + width], requirements="W")  # else torch warns
    planes, slot = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (window, out))
    # What torch.nn.functional.interpolate calls, but straight into the slot: its own result has planes,
    # and to turn those into pixels takes longer than to scale them.
    torch.ops.aten._upsample_bilinear2d_aa.out(planes, [side, side], False, None, None, out=slot)
    if flip:
        slot.copy_(slot.flip(-1))
