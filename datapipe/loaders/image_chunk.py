"""Images of a chunk on their way into the slots of a batch, and where their bytes are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import numpy as np

from ..dataset import DataSet
from ..dataset.shard_files import NOWHERE, Data, File
from ..errors import ShardCorruptError, ShardReadError
from ..images.codec import decode
from ..images.window import Box
from ..native import PROGRESS
from .batch_slots import BatchSlots


class BatchPlan(NamedTuple):
    """What belongs into each slot of a batch that is not padding, in order."""

    samples: np.ndarray  # int64[N]
    shards: list[int]
    jobs: np.ndarray  # JOB[N]


class PendingImage(NamedTuple):
    """An image whose bytes are there."""

    slot: int
    sample: int
    data: Data  # encoded
    size: tuple[int, int]  # width and height in pixels, for which `box` was drawn
    box: Box
    scale: int  # see `augment.scales`
    flip: bool


class ImageChunk(ABC):
    """Images of one chunk.

    Attributes:
        slots: Slot of each image.
        samples: Number of each image in the data set.
        jobs: One JOB per image, JOB[N]: what is known of it beforehand.
        data: Bytes of the images that have been read.
        bad: Errors of images that cannot be put into their slots, by slot.
        only_pixels: Whether the images are nothing but pixels, which may look like the first bytes of a JPEG.
    """

    only_pixels = False

    def __init__(self, slots: Sequence[int], samples: np.ndarray, jobs: np.ndarray) -> None:
        self.slots, self.samples, self.jobs = slots, samples, jobs
        self.data: dict[int, Data] = {}
        self.bad: dict[int, Exception] = {}

    @abstractmethod
    def locate(self) -> tuple[AbstractContextManager[object], np.ndarray]:
        """Write into `jobs` where the bytes of each image are, if that is known.

        Returns:
            Holds what must live while they are read there; and int64[PROGRESS], where it is told which is being read.
        """

    @abstractmethod
    def read(self, i: int) -> Data:
        """Return the bytes of an image. Raises ShardReadError, and ShardCorruptError for bytes that are wrong."""

    def decode(self, image: PendingImage, channels: int) -> np.ndarray:
        """Decode a whole image: uint8[H, W, channels]. Raises ValueError or DecodeError."""
        return decode(image.data, channels)

    def pending(self, numbers: Sequence[int], slots: BatchSlots) -> Iterator[PendingImage]:
        """Read some of the images, until the batch is abandoned, and yield those whose bytes are right."""
        jobs = self.jobs
        columns = (jobs[name].tolist() for name in ("width", "height", "box", "scale", "flip"))
        widths, heights, boxes, scales, flips = columns
        for i in numbers:
            if slots.abandoned:
                return
            try:
                data = self.data[i] if i in self.data else self.read(i)
            except ShardCorruptError as error:
                self.bad[self.slots[i]] = error
                continue
            size = widths[i], heights[i]
            yield PendingImage(self.slots[i], int(self.samples[i]), data, size, boxes[i], scales[i], bool(flips[i]))


class ChunkInMemory(ImageChunk):
    """Images whose bytes are there already, in `encoded`."""

    def __init__(self, slots: Sequence[int], samples: np.ndarray, jobs: np.ndarray, encoded: Sequence[Data]) -> None:
        super().__init__(slots, samples, jobs)
        self.data = dict(enumerate(encoded))
        jobs["size"] = list(map(len, encoded))

    def locate(self) -> tuple[AbstractContextManager[object], np.ndarray]:
        return nullcontext(_point(self.jobs, self.data)), np.zeros(PROGRESS, np.int64)

    def read(self, i: int) -> Data:
        return self.data[i]


class IndexedChunk(ImageChunk):
    """Images of a packed data set, those of some slots of a batch."""

    def __init__(self, plan: BatchPlan, slots: slice, data_set: DataSet) -> None:
        super().__init__(range(slots.start, slots.stop), plan.samples[slots], plan.jobs[slots])
        self._data_set, self._shards = data_set, plan.shards[slots]
        self.only_pixels = data_set.raw_shape is not None

    def locate(self) -> tuple[AbstractContextManager[object], np.ndarray]:
        jobs, reader = self.jobs, self._data_set.reader
        offsets, sizes = jobs["offset"].tolist(), jobs["size"].tolist()
        files: list[File | None] = []
        places = []
        for i, extent in enumerate(zip(self._shards, offsets, sizes, strict=True)):
            file = reader.file_for(*extent)
            if file is not None:
                places.append(file.locate(*extent[1:]))
            else:
                with suppress(ShardCorruptError):  # which is raised again where it counts
                    self.data[i] = self.read(i)  # opens the shard
                places.append(NOWHERE)
            files.append(file)
        jobs["data"], jobs["fd"], jobs["is_direct"] = zip(*places, strict=True)
        _point(jobs, self.data)
        return reader.watch_chunk(files, offsets, progress := np.zeros(PROGRESS, np.int64)), progress

    def read(self, i: int) -> Data:
        return self._data_set.read_at(*self._extent(i))

    def decode(self, image: PendingImage, channels: int) -> np.ndarray:
        return self._data_set.pixels(image.sample, image.data)

    def _extent(self, i: int) -> tuple[int, int, int, int, int]:
        job = self.jobs[i]
        return int(self.samples[i]), self._shards[i], int(job["offset"]), int(job["size"]), int(job["checksum"])


class BlockedChunk(IndexedChunk):
    """Images of a packed data set, each a part of the block that was read with it.

    `takers` are functions, one for each image of the batch, that take bytes of the block: those at an offset in the
    shard, so many.
    """

    def __init__(
        self, plan: BatchPlan, slots: slice, data_set: DataSet, takers: Sequence[Callable[[int, int], Data]]
    ) -> None:
        super().__init__(plan, slots, data_set)
        self._takers = takers[slots]
        self._parts: dict[int, Data] = {}  # not compared with the checksums

    def locate(self) -> tuple[AbstractContextManager[object], np.ndarray]:
        parts = {i: self._take(i) for i in range(len(self.jobs))}
        return nullcontext(_point(self.jobs, parts)), np.zeros(PROGRESS, np.int64)

    def read(self, i: int) -> Data:
        sample, shard, offset, _, checksum = self._extent(i)
        return self._data_set.checked(sample, self._take(i), shard, offset, checksum)

    def _take(self, i: int) -> Data:
        """Return as many bytes as the index says: so many are read at their address in memory."""
        if i not in self._parts:
            offset, size = int(self.jobs[i]["offset"]), int(self.jobs[i]["size"])
            try:
                part: Data = self._takers[i](offset, size)
                if len(part) != size:  # an index may have it end in the next sample, which is in another piece
                    part = self._data_set.reader.read(self._shards[i], offset, size)
                self._parts[i] = part
            except ShardReadError as error:
                error.key = error.key or self._data_set.key(int(self.samples[i]))
                raise
        return self._parts[i]


def _point(jobs: np.ndarray, encoded: Mapping[int, Data]) -> list[np.ndarray]:
    """Have jobs point to bytes, by their numbers; return views that keep their memory alive."""
    views = [np.frombuffer(data, np.uint8) for data in encoded.values()]
    jobs["data"][list(encoded)] = [view.ctypes.data for view in views]
    return views
