"""The `cpu` backend: threads read, decode, cut and resize into batch memory.

A batch is cut into chunks; a thread fills the slots of one chunk at a time, and works out the chunk's
samples and windows itself, since they are pure functions of its positions. The decoders release the
interpreter's lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet
from ..order import slice_positions
from .base import Batch, Loader, LoaderOptions

CHUNK = 32  # samples: small enough to share a batch among threads, large enough for numpy's overhead
AHEAD = 3  # batches under way while the consumer has one: enough to ride out a slow read


def open(path: Path, options: LoaderOptions, device: object) -> CpuLoader:
    data_set = DataSet(path)
    try:
        return CpuLoader(data_set, options, torch.device(device) if device is not None else None)
    except BaseException:
        data_set.close()
        raise


class CpuLoader(Loader):
    """See `open_loader`. `stage_s` says where the threads spent their time: read, decode, resize (seconds)."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device | None) -> None:
        super().__init__(data_set, options)
        self.stage_s: Counter[str] = Counter()
        self._device = None if device is None or device.type == "cpu" else device
        shape = (options.batch_size, self.size, self.size, self.channels)
        self._memory = _BatchMemory(shape, pinned=self._device is not None)
        self._pool = _decoders(options.num_threads())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _batches(self, epoch: int, steps: range) -> Iterator[Batch]:
        samples = self._samples(epoch)
        under_way: deque[tuple[_Slots, list[Future]]] = deque()
        on_device: deque[tuple[torch.cuda.Event, Batch]] = deque()
        upcoming = iter(steps)
        try:
            while True:
                while len(under_way) < AHEAD and (step := next(upcoming, None)) is not None:
                    under_way.append(self._start(epoch, step, samples))
                if not under_way:
                    return
                slots, futures = under_way.popleft()
                for future in futures:
                    self.stage_s.update(future.result())
                batch = slots.batch()
                del slots
                yield self._deliver(batch, on_device) if self._device is not None else batch
                del batch  # so that its memory is free for the next one
        finally:
            for _, futures in under_way:
                for future in futures:
                    future.cancel()
            for _, futures in under_way:
                for future in futures:
                    if not future.cancelled():
                        future.exception()  # wait: nothing may write into memory that is gone
            for event, _ in on_device:
                event.synchronize()  # nor may memory be used again that is being copied

    def _start(self, epoch: int, step: int, samples: np.ndarray) -> tuple[_Slots, list[Future]]:
        options = self.options
        positions = slice_positions(step, options.batch_size, options.rank, options.world_size)
        slots = _Slots(self._memory.take(), positions, samples)
        chunks = [slice(i, i + CHUNK) for i in range(0, options.batch_size, CHUNK)]
        return slots, [self._pool.submit(self._fill, epoch, slots, chunk) for chunk in chunks]

    def _fill(self, epoch: int, slots: _Slots, chunk: slice) -> dict[str, float]:
        """Fill the slots of a chunk; return the seconds of each stage."""
        valid = slots.valid[chunk]
        images = slots.images[chunk]
        images[~valid] = 0
        images = images[: valid.sum()]  # padding lies behind the last position
        samples = slots.samples[chunk][valid]
        if not len(samples):
            return {}
        records = self.data_set.index[samples]
        slots.labels[chunk][: len(samples)] = records["label"]
        windows = self._windows(epoch, slots.positions[chunk][valid], records)
        fields = zip(
            samples.tolist(), records["shard"].tolist(), records["offset"].tolist(), records["size"].tolist(),
            records["checksum"].tolist(), windows.boxes.tolist(), windows.flips.tolist(), images, strict=True,
        )  # fmt: skip
        read_s = decode_s = resize_s = 0.0
        clock = time.perf_counter
        for sample, shard, offset, size, checksum, box, flip, image in fields:
            start = clock()
            data = self.data_set.read_at(sample, shard, offset, size, checksum)
            read = clock()
            pixels = self.data_set.pixels(sample, data)
            decoded = clock()
            cut(pixels, box, flip, image)
            read_s += read - start
            decode_s += decoded - read
            resize_s += clock() - decoded
        return {"read": read_s, "decode": decode_s, "resize": resize_s}

    def _deliver(self, batch: Batch, on_device: deque[tuple[torch.cuda.Event, Batch]]) -> Batch:
        """Copy to the device without waiting; the host's memory is kept until the copy is done."""
        delivered = batch.to(self._device)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        on_device.append((event, batch))
        while on_device[0][0].query() and len(on_device) > 1:
            on_device.popleft()
        return delivered


def _decoders(count: int) -> ThreadPoolExecutor:
    """Threads in which torch stays in the thread.

    By default every thread that calls torch gets helpers of its own, one a core: with several decoders they
    fight each other, and the training, for the cores. The process's setting stays as it is.
    """
    threads_before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def settle() -> None:
        torch.get_num_threads()  # a thread takes over the process's setting when it first asks; then it may differ
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="datapipe")
    for _ in range(count):
        pool.submit(settle)  # each waits for the others, so each is in a thread of its own
    ready.wait()
    torch.set_num_threads(threads_before)
    return pool


def cut(pixels: np.ndarray, box: list[int], flip: bool, out: np.ndarray) -> None:
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


class _Slots:
    """A batch being filled: slot `i` is for the sample at `positions[i]`."""

    def __init__(self, images: np.ndarray, positions: np.ndarray, samples: np.ndarray) -> None:
        self.images, self.positions = images, positions
        self.valid = positions < len(samples)
        self.samples = np.full(len(positions), -1, np.int64)
        self.samples[self.valid] = samples[positions[self.valid]]
        self.labels = np.zeros(len(positions), np.int64)

    def batch(self) -> Batch:
        images, *rest = (torch.from_numpy(a) for a in (self.images, self.labels, self.samples, self.valid))
        return Batch(images.permute(0, 3, 1, 2), *rest)


class _BatchMemory:
    """Memory for batches, used again once no tensor and no array refers to it."""

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """uint8 of the shape, with whatever the last batch left in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        # A tensor made of this view keeps it alive as long as any tensor shares the storage.
        view = memory[:]
        weakref.finalize(view, self._free.append, memory).atexit = False
        return view
