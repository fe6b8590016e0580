"""Cutting what a decoder on another device needs out of each image: in C as far as that takes them, else here."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from .. import native
from ..images import Buffer
from ..images.codec import read_header
from ..images.jpeg import is_jpeg
from ..images.window import Box, check_size, cut
from .batch_slots import BatchSlots, WindowMemory
from .decoder import Decoder
from .image_chunk import ImageChunk, PendingImage
from .native_pixels import choose_native, do_jobs
from .options import LoaderOptions


class EncodedImages(BatchSlots):
    """Slots with what a decoder is fed.

    `data` are uint8[bytes] each, and valid as long as this object lives; `starts` and `shapes` int32[B, 2] (rows,
    columns), `flips` int32[B].

    Args:
        positions: Positions in the epoch, int64[B].
        count: Number of positions, the first ones, that have a sample.
        nothing: A small image, fed for slots without one.
    """

    def __init__(self, positions: np.ndarray, count: int, nothing: np.ndarray) -> None:
        super().__init__(positions, count)
        self.data = [nothing] * len(positions)
        self.starts, self.shapes = (np.empty((len(positions), 2), np.int32) for _ in range(2))
        self.flips = np.zeros(len(positions), np.int32)


class WindowCutter(Decoder[EncodedImages]):
    """Cuts out what has to be decoded of each image.

    Args:
        options: Options of the loader.
        may_end_late: Whether the decoder takes JPEGs whose data do not end with the last row. Else it gets whole images
            instead of such windows.
    """

    def __init__(self, options: LoaderOptions, may_end_late: bool = True) -> None:
        self.chunk = max(self.chunk, options.batch_size // self.count_threads(options))  # as cutting takes little time
        self._library = choose_native().native
        self._may_end_late = may_end_late
        self._memory = WindowMemory()

    def count_threads(self, options: LoaderOptions) -> int:
        """Return a quarter of the loader's threads, or two: the device's decoder has as many as all of them, and more
        to do, while reading and cutting an image take a twentieth of the time."""
        return min(options.num_threads(), max(2, options.num_threads() // 4))

    def put(self, slots: EncodedImages, chunk: ImageChunk) -> dict[str, float]:
        left, stage_s = list(range(len(chunk.slots))), {"read": 0.0, "window": 0.0}
        if self._library is not None:
            left, stage_s = _cut_in_c(self._library, slots, chunk, self._memory, self._may_end_late)
        began = time.perf_counter()
        images = list(chunk.pending(left, slots))
        read = time.perf_counter()
        for image in images:
            slot = image.slot
            try:
                data, box = _cut_window(image, self._may_end_late)
            except ValueError as error:
                chunk.bad[slot] = error
                continue
            slots.data[slot] = np.frombuffer(data, np.uint8)
            slots.starts[slot] = box[1], box[0]
            slots.shapes[slot] = box[3], box[2]
            slots.flips[slot] = image.flip
        stage_s["read"] += read - began
        stage_s["window"] += time.perf_counter() - read
        return stage_s


def _cut_in_c(
    library: native.Native, slots: EncodedImages, chunk: ImageChunk, windows: WindowMemory, may_end_late: bool
) -> tuple[list[int], dict[str, float]]:
    """Cut windows without the interpreter's lock; return which images are left, and the seconds of each stage."""
    jobs = chunk.jobs
    sizes, boxes = jobs["size"].copy(), jobs["box"].copy()
    ends = np.cumsum(sizes)
    starts = ends - sizes
    memory = windows.take(int(ends[-1]), slots)  # a window is at most as large as its image
    jobs["is_pixels"], jobs["out"] = False, memory.ctypes.data + starts
    left, stage_s = do_jobs(chunk, partial(library.cut, jobs, may_end_late, slots.stop), native.CUT_STAGES)
    cut_sizes, cut_boxes = jobs["size"].copy(), jobs["box"].copy()
    jobs["size"], jobs["box"] = sizes, boxes
    if slots.abandoned:  # some may not have been cut
        return left, stage_s
    done = np.flatnonzero(jobs["status"] == native.DONE)
    for i, start, size in zip(done.tolist(), starts[done].tolist(), cut_sizes[done].tolist(), strict=True):
        slots.data[chunk.slots[i]] = memory[start : start + size]
    cut_slots, boxes = np.array(chunk.slots)[done], cut_boxes[done]
    slots.starts[cut_slots], slots.shapes[cut_slots] = boxes[:, [1, 0]], boxes[:, [3, 2]]
    slots.flips[cut_slots] = jobs["flip"][done]
    return left, stage_s


def _cut_window(image: PendingImage, may_end_late: bool) -> tuple[Buffer, Box]:
    """Cut out what has to be decoded of a JPEG, and give the box in it; other images stay whole."""
    data, box = image.data, image.box
    if not is_jpeg(data):
        header = read_header(data)
        check_size(header.width, header.height, image.size)
        return data, box
    window = cut(data, box, image.size)
    if window.ends_late and not may_end_late:
        return data, box
    return window.data, (box[0] - window.left, box[1] - window.top, box[2], box[3])
