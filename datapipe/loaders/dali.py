"""The `dali` backend: our threads read and cut windows out of the files, NVIDIA DALI decodes and scales them.

On a GPU decoding is nvJPEG's, partly on hardware engines. Samples, windows and flips are those of the `cpu` backend;
pixels differ by the decoder and by rounding. Without a GPU (`device_id=None`) it is for tests: the `cpu` backend needs
less of the processor.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet
from ..dataset.index import ENCODINGS
from ..dataset.shard_reader import Data
from ..errors import DatapipeError, DecodeError, MissingBackendError, SettingError
from ..images.codec import encode_png, read_header
from ..images.jpeg import is_jpeg
from ..images.window import Box, check_size, cut
from .base import Batch, LoaderOptions, device_of
from .batch_memory import BatchMemory
from .threaded import FillingLoader, Slots, Wanted
from .threads import in_time, wait_for

DEPTH = 2  # batches that DALI works on
DECODED = {"jpeg", "png", "pnm"}  # of index.ENCODINGS: what DALI's decoder takes


def open(path: Path | str, options: LoaderOptions, device: object) -> DaliLoader:
    data_set = in_time(options.timeout_s, path, "opening the data set", DataSet, path, options.io, options.retries)
    try:
        return DaliLoader(data_set, options, device_of(device))
    except BaseException:
        data_set.close()
        raise


class _Encoded(Slots):
    """With what DALI is fed: `data` uint8[bytes] each, `starts` and `shapes` int32[B, 2] (rows, columns), `flips`."""

    data: list[np.ndarray]
    starts: np.ndarray
    shapes: np.ndarray
    flips: np.ndarray


class DaliLoader(FillingLoader):
    """See `open_loader`."""

    begun_ahead = DEPTH - 1

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(data_set, options)
        kinds = {ENCODINGS[number] for number in np.unique(data_set.index["encoding"])}
        if not kinds <= DECODED:
            raise SettingError(
                f"backend: 'dali' decodes images, and this data set holds {', '.join(sorted(kinds - DECODED))}; "
                "allowed: cpu"
            )
        self._device = device
        shape = (options.batch_size, self.size, self.size, self.channels)
        self._memory = BatchMemory(shape, pinned=False)
        nothing = np.zeros((1, 1) if self.channels == 1 else (1, 1, 3), np.uint8)
        self._nothing = np.frombuffer(encode_png(nothing), np.uint8)
        # Windows are as large as the output, and may reach beyond the image.
        self._pads = options.train and self._augment.crop == "pad"
        self._scheduled: deque[_Encoded] = deque()
        self._pipelines = [self._built()]
        # A pipeline that is still there when the interpreter goes down aborts the process.
        weakref.finalize(self, self._pipelines.clear)

    def close(self) -> None:
        super().close()
        self._pipelines.clear()

    @property
    def _pipeline(self):
        return self._pipelines[0]

    def _built(self):
        try:
            from nvidia.dali import Pipeline, fn, types
        except ImportError as error:
            raise MissingBackendError.for_extra("DALI is not installed", "dali") from error
        on_gpu = self._device.type == "cuda"
        options = self.options
        pipeline = Pipeline(
            batch_size=options.batch_size,
            num_threads=options.num_threads(),
            device_id=(self._device.index or 0) if on_gpu else None,
            prefetch_queue_depth=1,  # DALI runs so many batches at first: it has one
        )
        with pipeline:
            data = fn.external_source(name="data", ndim=1, dtype=types.UINT8)
            start, shape = (fn.external_source(name=name, ndim=1, dtype=types.INT32) for name in ("start", "shape"))
            flip = fn.external_source(name="flip", ndim=0, dtype=types.INT32)
            kind = types.RGB if self.channels == 3 else types.GRAY
            # Windows are those of the image as it is stored, which no other backend turns by its EXIF orientation.
            decoding = {"device": "mixed" if on_gpu else "cpu", "output_type": kind, "adjust_orientation": False}
            if self._pads:
                images = fn.decoders.image(data, **decoding)
                images = fn.slice(images, start=start, shape=shape, axes=[0, 1], out_of_bounds_policy="pad")
            else:
                images = fn.decoders.image_slice(data, start=start, shape=shape, axes=[0, 1], **decoding)
                images = fn.resize(images, size=[self.size, self.size], interp_type=types.INTERP_LINEAR, antialias=True)
            pipeline.set_outputs(fn.flip(images, horizontal=flip))
        pipeline.build()
        return pipeline

    # --- in the threads ---

    def _put(self, slots: _Encoded, wanted: list[Wanted]) -> dict[str, float]:
        began = time.perf_counter()
        for one in wanted:
            try:
                data, box = _window(one)
            except ValueError as error:
                self._take_bad(slots, one.slot, error)
                continue
            slots.data[one.slot] = np.frombuffer(data, np.uint8)
            slots.starts[one.slot] = box[1], box[0]
            slots.shapes[one.slot] = box[3], box[2]
            slots.flips[one.slot] = one.flip
        return {"window": time.perf_counter() - began}

    def _put_nothing(self, slots: _Encoded, slot: int | slice) -> None:
        for i in range(*slot.indices(len(slots.data))) if isinstance(slot, slice) else (slot,):
            slots.data[i] = self._nothing
        slots.starts[slot], slots.shapes[slot] = 0, self.size if self._pads else 1

    # --- in the consumer ---

    def _new_slots(self, positions: np.ndarray, samples: np.ndarray) -> _Encoded:
        slots = _Encoded(positions, samples)
        count = len(positions)
        slots.data = [self._nothing] * count
        slots.starts, slots.shapes = np.empty((count, 2), np.int32), np.empty((count, 2), np.int32)
        slots.flips = np.zeros(count, np.int32)
        return slots

    def _begin(self, slots: _Encoded) -> None:
        self._scheduled.append(slots)
        self._feed(slots)

    def _feed(self, slots: _Encoded) -> None:
        for name, values in (("data", slots.data), ("start", slots.starts), ("shape", slots.shapes)):
            self._pipeline.feed_input(name, values)
        self._pipeline.feed_input("flip", slots.flips)
        self._pipeline.schedule_run()

    def _finish(self, slots: _Encoded) -> Batch:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        asked = time.perf_counter()
        try:
            (images,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            self._begin_anew(slots, error)
            (images,) = self._pipeline.share_outputs()
        self._scheduled.popleft()
        self.stage_s["decode"] += time.perf_counter() - asked
        images = images.as_tensor()
        if self._device.type == "cuda":
            shape = (len(slots.data), self.size, self.size, self.channels)
            images_BHWC = torch.empty(shape, dtype=torch.uint8, device=self._device)
            feed_ndarray(images, images_BHWC, cuda_stream=torch.cuda.current_stream(self._device))
        else:
            memory = self._memory.take()
            memory[:] = np.asarray(images)
            images_BHWC = torch.from_numpy(memory)
        self._pipeline.release_outputs()
        if not slots.valid.all():
            images_BHWC[torch.from_numpy(~slots.valid).to(self._device)] = 0
        rest = (torch.from_numpy(a).to(self._device) for a in (slots.labels, slots.samples, slots.valid))
        return Batch(images_BHWC.permute(0, 3, 1, 2), *rest)

    def _drain(self, begun: Collection[Slots]) -> None:
        try:
            while self._scheduled and self._pipelines:
                self._scheduled.popleft()
                self._pipeline.share_outputs()
                self._pipeline.release_outputs()
        except (RuntimeError, StopIteration):
            self._pipelines[:] = [self._built()]
        finally:
            self._scheduled.clear()

    def _begin_anew(self, slots: _Encoded, error: Exception) -> None:
        """DALI cannot decode a batch, and says no more: find the bad images with our own decoder, and go on without."""
        self._pipelines[:] = [self._built()]  # the old one takes no more batches
        scheduled = list(self._scheduled)
        self._scheduled.clear()
        searching = self._pool.submit(self._take_undecodable, slots)  # in a thread: it reads again
        if not wait_for(searching, self.options.timeout_s, self._tell):
            raise DatapipeError(f"DALI cannot decode a batch: {error}", path=self.data_set.folder) from error
        for begun in scheduled:
            self._begin(begun)

    def _take_undecodable(self, slots: _Encoded) -> bool:
        """In a thread: take for bad what our own decoder refuses as a whole. Returns whether there is any."""
        found_any = False
        for slot in np.flatnonzero(slots.valid).tolist():
            sample = int(slots.samples[slot])
            try:
                self.data_set.pixels(sample, self.data_set.read(sample))
            except DecodeError as bad:
                self._take_bad(slots, slot, bad)
                found_any = True
        return found_any


def _window(wanted: Wanted) -> tuple[Data, Box]:
    data, box = wanted.data, wanted.box
    if not is_jpeg(data):
        header = read_header(data)
        check_size(header.width, header.height, wanted.size)
        return data, box
    window = cut(data, box, wanted.size)
    return window.data, (box[0] - window.left, box[1] - window.top, box[2], box[3])
