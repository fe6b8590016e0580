"""The `webdataset` backend: tar shards streamed the WebDataset way, also others' shards, and the output of commands.

An epoch's shards, shuffled, are one long stream of samples, of which each rank reads an equal part, from the middle of
a shard to the middle of another. So no sample is lost, and all ranks have the same number of steps, whatever the shards
hold. For that the number of samples in each shard has to be known: from our manifest, from DALI's index beside it
(`.idx`), from a `sizes.json` (shard name to count), or by reading it once.

The order depends on the number of ranks and on the shuffle buffer; a state holds for the same number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from itertools import islice
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from ..errors import DatapipeError, ShardReadError
from ..images.codec import decode, read_header
from ..sampling.augment import scales
from ..sampling.order import BUFFER, permutation, uniform
from .base import Batch, DataDescription, Loader, Place
from .delivery import Delivery, Images
from .device import resolve_device
from .options import LoaderOptions
from .painter import Painter
from .prefetch import CHUNK, ChunkReport, PendingImage, PrefetchLoader, Threads
from .tar_streams import Sample, Shard, describe, end_commands, locate, read_samples
from .threads import Pool

SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples


class ShardPart(NamedTuple):
    """What a rank reads of a shard."""

    shard: int
    skip: int  # samples
    take: int  # samples, behind those


def make_loader(
    path: str, options: LoaderOptions, device: torch.device | str | int | None, split: str | None = None
) -> Loader:
    """Open the shards at `path`, those of a split if there are several, and make a loader that delivers to `device`."""
    options.refuse_other_than("backend: 'webdataset'", order="full", io="cached")
    shards, counts, data = describe(str(path), split, options)
    return WebDatasetLoader(shards, counts, data, options, resolve_device(device))


class StreamSlots(Images):
    """Slots whose samples are known when they were read."""

    streamed: list[Sample]  # in the order of the slots


class WebDatasetLoader(PrefetchLoader[StreamSlots]):
    """The loader of the `webdataset` backend. See `open_loader`.

    `samples` of a batch count through the shards as they are named.

    Args:
        shards: In the order of their names.
        counts: The number of samples in each.
        data: What is known of all of them.
        options: The loader's.
        device: Where batches are delivered.
    """

    def __init__(
        self,
        shards: list[Shard],
        counts: list[int],
        data: DataDescription,
        options: LoaderOptions,
        device: torch.device,
    ) -> None:
        super().__init__(data, options)
        self._shards, self._counts = shards, counts
        self._firsts = np.cumsum([0, *counts]).tolist()
        self._device = device
        self._delivery = self._new_delivery()
        self._painter = Painter[StreamSlots](self.channels, self._decode_whole, self._take_bad)
        self._shard = shards[0]  # that is being read
        self._streams: list[BinaryIO] = []  # that are being read

    def identity(self) -> dict[str, int | str]:
        return {**super().identity(), "world_size": self.options.world_size}

    def _decode_whole(self, image: PendingImage) -> np.ndarray:
        return decode(image.data, self.channels)

    def _put(self, slots: StreamSlots, images: list[PendingImage]) -> dict[str, float]:
        return self._painter.put(slots, images)

    def _put_nothing(self, slots: StreamSlots, slot: int | slice) -> None:
        slots.images[slot] = 0

    def _finish(self, slots: StreamSlots) -> Batch:
        return self._delivery.deliver(slots)

    def _take_size(self, size: int) -> None:
        super()._take_size(size)
        self._delivery = self._new_delivery()

    def _new_delivery(self) -> Delivery:
        return Delivery((self.options.batch_size, self.size, self.size, self.channels), self._device)

    def _drain(self) -> None:
        self._delivery.drain()

    def _place(self, slots: StreamSlots, slot: int) -> Place:
        sample = slots.streamed[slot]
        return {**locate(sample.shard), "key": sample.key}

    def _explain_wait(self) -> tuple[Place, str]:
        return locate(self._shard), ""

    def _interrupt(self) -> None:
        end_commands(self._streams)

    def _forget_files(self) -> None:
        self._streams = []

    # --- in the consumer ---

    def _start_batches(self, epoch: int, steps: range, threads: Threads) -> Generator[StreamSlots]:
        batch_size = self.options.batch_size
        parts = rank_parts(self._counts, self.options, epoch)
        total = sum(part.take for part in parts)
        samples = self._shuffle(parts, epoch) if self.options.train else self._stream(parts)
        stream = islice(samples, steps.start * batch_size, None)  # those before are read, not decoded
        try:
            for step in steps:
                count = max(0, min(batch_size, total - step * batch_size))
                slots = StreamSlots(self._positions(step), count, self._delivery.new_images())
                slots.tasks.append(threads.read.submit(self._read, epoch, slots, count, stream, threads.fill))
                yield slots
        finally:
            threads.read.submit(samples.close)  # behind what it is reading

    # --- in the reading thread ---

    def _stream(self, parts: list[ShardPart]) -> Generator[Sample]:
        """Iterate over the samples of some parts of shards, in order."""
        for number, skip, take in parts:
            self._shard = shard = self._shards[number]
            samples, num_read, count = read_samples(shard, self._streams), 0, self._counts[number]
            for num_read, sample in enumerate(islice(samples, skip, skip + take), 1):
                if skip + num_read == count and next(samples, None) is not None:
                    raise ShardReadError(f"holds more than the {count} samples that were noted of it", **locate(shard))
                yield sample._replace(number=self._firsts[number] + skip + num_read - 1)
            if num_read < take:
                raise ShardReadError(f"ends after {skip + num_read} samples of {count}", **locate(shard))
            samples.close()

    def _shuffle(self, parts: list[ShardPart], epoch: int) -> Generator[Sample]:
        """Iterate over the samples of some parts of shards, each drawn from the next thousand."""
        buffer: list[Sample] = []
        stream, counter = self._stream(parts), self.options.rank << 32
        while True:
            buffer += islice(stream, SHUFFLED - len(buffer))
            if not buffer:
                return
            (draw,) = uniform(self.options.seed, epoch, BUFFER, np.array([counter]), 1)[0]
            counter += 1
            at = int(draw * len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()

    def _read(
        self, epoch: int, slots: StreamSlots, count: int, stream: Iterator[Sample], pool: Pool
    ) -> ChunkReport | None:
        """Read a batch's samples, and have them decoded."""
        if slots.abandoned:
            return None
        began = time.perf_counter()
        slots.streamed = list(islice(stream, count))
        self._put_nothing(slots, slice(count, None))
        for first in range(0, count, CHUNK):
            chunk = range(first, min(first + CHUNK, count))
            slots.tasks.append(pool.submit(self._fill, epoch, slots, chunk))
        stage_s = {"read": time.perf_counter() - began}
        return ChunkReport(stage_s, sum(len(sample.data) for sample in slots.streamed))

    # --- in the decoding threads ---

    def _fill(self, epoch: int, slots: StreamSlots, chunk: range) -> ChunkReport | None:
        if slots.abandoned:
            return None
        readable: list[int] = []  # slots
        sizes: list[tuple[int, int]] = []
        for slot in chunk:
            sample = slots.streamed[slot]
            slots.samples[slot], slots.labels[slot] = sample.number, sample.label
            try:
                if sample.error is not None:
                    raise sample.error
                header = read_header(sample.data)
                readable.append(slot)
                sizes.append((header.width, header.height))
            except (ValueError, DatapipeError) as error:
                self._take_bad(slots, slot, error)
        if not readable:
            return None
        widths, heights = np.array(sizes).T
        crops = self._crops(epoch, slots.positions[readable], slots.samples[readable], widths, heights)
        boxes, flips = crops.boxes.tolist(), crops.flips.tolist()
        images = [
            PendingImage(slot, slots.streamed[slot].number, slots.streamed[slot].data, size, box, scale, flip)
            for slot, size, box, scale, flip in zip(
                readable, sizes, boxes, scales(crops.boxes, self.size).tolist(), flips, strict=True
            )
        ]
        return ChunkReport(self._put(slots, images), 0)


def rank_parts(counts: list[int], options: LoaderOptions, epoch: int) -> list[ShardPart]:
    """List what a rank reads in an epoch, in order. Pure.

    The ranks share the stream evenly: with `last` "drop" its whole global batches (the rest, of other shards in each
    epoch, is left out), or else all samples, so that two ranks differ by one sample at most.

    Args:
        counts: The number of samples in each shard.
        options: The loader's: of the rank.
        epoch: From 0.
    """
    order = permutation(len(counts), options.seed, epoch).tolist() if options.train else range(len(counts))
    total, ranks = sum(counts), options.world_size
    if options.last_batch == "drop":
        total = total // options.global_batch_size * options.global_batch_size
    first, stop = total * options.rank // ranks, total * (options.rank + 1) // ranks
    parts, at = [], 0
    for shard in order:
        low, high = max(first, at), min(stop, at + counts[shard])
        if low < high:
            parts.append(ShardPart(shard, low - at, high - low))
        at += counts[shard]
    return parts
