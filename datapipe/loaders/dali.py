"""The `dali` backend: our threads read and cut windows out of the files, NVIDIA DALI decodes and resizes them.

On a GPU decoding is nvJPEG's, partly on hardware engines. Samples, crops and flips are those of the `cpu` backend;
pixels differ by the decoder and by rounding. Without a GPU (`device_id=None`) it is for tests: the `cpu` backend needs
less of the processor.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..dataset import DataSet
from ..dataset.index import ENCODINGS
from ..errors import DatapipeError, DecodeError, MissingBackendError, SettingError
from ..images.codec import encode_png
from .base import DataDescription, Loader
from .batch import Batch
from .cpu import make_source
from .device import KeptForStream, dali_extra, read_driver, resolve_device, to_device
from .engine import Delivery, Engine
from .indexed import open_for_loader
from .options import LoaderOptions
from .window_cutter import EncodedImages, WindowCutter

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

_DEPTH = 3  # batches that DALI works on: as long as a step, or two, may take to decode one
# For a GPU to show otherwise: the share of images that its decoding engines get, which is DALI's default; and whether
# nvJPEG takes JPEGs whose data do not end with the last row.
HW_DECODER_LOAD = 0.65
MAY_END_LATE_ON_GPU = False
_USUAL = 0.99  # of the images are no larger than what memory is made ready for
_INPUTS = ("data", 1, "UINT8"), ("start", 1, "INT32"), ("shape", 1, "INT32"), ("flip", 0, "INT32")  # name, ndim, type
_DECODED = {"jpeg", "png", "pnm"}  # of index.ENCODINGS: what DALI's decoder takes


def make_loader(path: Path | str, options: LoaderOptions, local: Path | None = None) -> Loader:
    """Open the data set at `path`, of which a copy arrives at `local`, and make its loader."""

    with open_for_loader(path, options, local) as data_set:
        delivery = DaliDelivery(data_set, options)
        source, data = make_source(data_set, options), DataDescription.from_data_set(data_set)
        cutter = WindowCutter(options, takes_late_ends(resolve_device(options.device)))
        return Engine(data, options, source, cutter, delivery)


def takes_late_ends(device: torch.device) -> bool:
    """Return whether DALI decodes files whose data continue below their last row; its decoder on the CPU does."""
    return device.type == "cpu" or MAY_END_LATE_ON_GPU


class DaliDelivery(Delivery[EncodedImages]):
    """Batches that a pipeline of DALI decodes, resizes and mirrors.

    Raises:
        SettingError: DALI does not decode what the data set holds.
        MissingBackendError: DALI is not installed.
    """

    num_on_device = _DEPTH - 1

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        self._data_set, self._options = data_set, options
        self._size, self._channels = options.size, data_set.manifest.channels
        kinds = {ENCODINGS[number] for number in np.unique(data_set.index["encoding"])}
        if not kinds <= _DECODED:
            raise SettingError(
                f"backend: 'dali' decodes images, and this data set holds {', '.join(sorted(kinds - _DECODED))}; "
                "allowed: cpu"
            )
        self._device = resolve_device(options.device)
        nothing = np.zeros((1, 1) if self._channels == 1 else (1, 1, 3), np.uint8)
        self._nothing = np.frombuffer(encode_png(nothing), np.uint8)
        # Crops are as large as the output, and may reach beyond the image.
        manifest = data_set.manifest
        self._pads = options.train and options.augment_for(manifest.width, manifest.height).crop == "pad"
        self._scheduled: deque[EncodedImages] = deque()  # DALI reads their memory, which it does not copy
        self._decoding = KeptForStream()
        index = data_set.index
        self._usual_size = [int(np.quantile(index[side], _USUAL)) for side in ("width", "height")]
        self._pipelines: list[Pipeline] = []
        self._rebuild()
        # A pipeline that is still there when the interpreter shuts down aborts the process.
        weakref.finalize(self, _end_pipelines, self._pipelines, self._scheduled)

    def close(self) -> None:
        _end_pipelines(self._pipelines, self._scheduled)

    @property
    def _pipeline(self) -> Pipeline:
        return self._pipelines[0]

    def set_size(self, size: int) -> None:
        self._size = size
        self._rebuild()

    def _rebuild(self) -> None:
        _end_pipelines(self._pipelines, self._scheduled)
        self._pipelines.append(self._build())

    def _build(self) -> Pipeline:
        try:
            from nvidia.dali import Pipeline, fn
            from nvidia.dali.types import DALIDataType, DALIImageType, DALIInterpType
        except ImportError as error:
            raise MissingBackendError.for_extra("DALI is not installed", dali_extra(read_driver())) from error
        on_gpu = self._device.type == "cuda"
        options = self._options
        pipeline = Pipeline(
            batch_size=options.batch_size,
            num_threads=options.num_threads(),
            device_id=self._device.index if on_gpu else None,
            prefetch_queue_depth=1,  # DALI runs so many batches at first: it has one
        )
        with pipeline:
            data, start, shape, flip = (
                fn.external_source(name=name, ndim=ndim, dtype=getattr(DALIDataType, dtype), no_copy=True)
                for name, ndim, dtype in _INPUTS
            )
            kind = DALIImageType.RGB if self._channels == 3 else DALIImageType.GRAY
            # Crops are those of the image as it is stored, which no other backend turns by its EXIF orientation.
            decoding: dict[str, Any] = {
                "device": "mixed" if on_gpu else "cpu",
                "output_type": kind,
                "adjust_orientation": False,
                # Those of a GPU. Chroma is interpolated as the cpu backend does it.
                "jpeg_fancy_upsampling": True,
                "hw_decoder_load": HW_DECODER_LOAD,
                "preallocate_width_hint": self._usual_size[0],
                "preallocate_height_hint": self._usual_size[1],
            }
            images: Any  # by DALI's stubs, fn.resize may return nothing
            if self._pads:
                decoded = fn.decoders.image(data, **decoding)
                images = fn.slice(decoded, start=start, shape=shape, axes=[0, 1], out_of_bounds_policy="pad")
            else:
                decoded = fn.decoders.image_slice(data, start=start, shape=shape, axes=[0, 1], **decoding)
                images = fn.resize(
                    decoded, size=[self._size, self._size], interp_type=DALIInterpType.INTERP_LINEAR, antialias=True
                )
            pipeline.set_outputs(fn.flip(images, horizontal=flip))
        pipeline.build()
        return pipeline

    def put_nothing(self, slots: EncodedImages, slot: int | slice) -> None:
        for i in range(*slot.indices(len(slots.data))) if isinstance(slot, slice) else (slot,):
            slots.data[i] = self._nothing
        slots.starts[slot], slots.shapes[slot] = 0, self._size if self._pads else 1

    def new_slots(self, positions: np.ndarray, count: int) -> EncodedImages:
        return EncodedImages(positions, count, self._nothing)

    def begin(self, slots: EncodedImages) -> None:
        self._scheduled.append(slots)
        inputs = slots.data, slots.starts, slots.shapes, slots.flips
        for (name, _, _), values in zip(_INPUTS, inputs, strict=True):
            self._pipeline.feed_input(name, values)
        self._pipeline.schedule_run()

    def finish(self, slots: EncodedImages, engine: Engine[EncodedImages]) -> Batch:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        stream = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device)
        began = time.perf_counter()
        try:
            (images,) = self._pipeline.share_outputs(cuda_stream=stream)  # which waits for them, and not the host
        except RuntimeError as error:
            if not self._pipelines:  # another thread has closed the loader
                raise
            self._restart_without_bad(slots, engine, error)
            (images,) = self._pipeline.share_outputs(cuda_stream=stream)
        engine.stage_s["decode"] += time.perf_counter() - began
        images = images.as_tensor()
        if stream is None:
            images_BHWC = torch.from_numpy(np.array(images))  # a copy: DALI uses its memory again
        else:
            shape = (len(slots.data), self._size, self._size, self._channels)
            images_BHWC = torch.empty(shape, dtype=torch.uint8, device=self._device)
            feed_ndarray(images, images_BHWC, cuda_stream=stream)
            self._decoding.keep(stream, slots)
        self._scheduled.popleft()
        self._pipeline.release_outputs()
        if not slots.valid.all():
            images_BHWC.masked_fill_(to_device(~slots.valid, self._device)[:, None, None, None], 0)
        rest = (to_device(a, self._device) for a in (slots.labels, slots.samples, slots.valid))
        return Batch(images_BHWC.permute(0, 3, 1, 2), *rest)

    def drain(self) -> None:
        try:
            while self._scheduled:
                self._pipeline.share_outputs()
                self._pipeline.release_outputs()
                self._scheduled.popleft()
        except Exception:  # an image cannot be decoded, or another thread closes the loader
            if self._pipelines:
                self._rebuild()
        finally:
            self._decoding.drain()

    def _restart_without_bad(self, slots: EncodedImages, engine: Engine[EncodedImages], error: Exception) -> None:
        """Continue without the bad images of a batch.

        DALI refuses the batch as a whole, and takes no others: our own decoder finds the images.
        """
        scheduled = list(self._scheduled)
        self._rebuild()
        if not engine.wait_for(engine.threads.fill.submit(self._take_undecodable, slots, engine)):
            raise DatapipeError(f"DALI cannot decode a batch: {error}", path=self._data_set.folder) from error
        for batch in scheduled:
            self.begin(batch)

    def _take_undecodable(self, slots: EncodedImages, engine: Engine[EncodedImages]) -> bool:
        """In a thread: take for bad what our own decoder refuses as a whole. Returns whether there is any."""
        has_bad = False
        for slot in np.flatnonzero(slots.valid).tolist():
            sample = int(slots.samples[slot])
            try:
                self._data_set.pixels(sample, self._data_set.read(sample))
            except DecodeError as error:
                engine.take_bad(slots, slot, error)
                has_bad = True
        return has_bad


def _end_pipelines(pipelines: list[Pipeline], scheduled: deque[EncodedImages]) -> None:
    """End what DALI does, and only then let go of the memory that it reads.

    A pipeline is not left to the garbage collector: what was raised in one refers to it.
    """
    while pipelines:
        pipelines.pop()._shutdown()
    scheduled.clear()
