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
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..errors import DatapipeError, ShardReadError
from ..images.codec import read_header
from ..native import JOB
from ..sampling.augment import scales
from ..sampling.order import BUFFER, permutation, uniform
from .base import Loader, Place
from .batch_slots import BatchSlots, ChunkReport, Images
from .delivery import HostDelivery
from .device import resolve_device
from .engine import Engine, SlotsT, Source
from .image_chunk import ImageChunk, ImagesInMemory
from .options import LoaderOptions
from .painter import Painter
from .tar_streams import Sample, Shard, describe, end_commands, locate, read_samples

SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples


class StreamedBatch(NamedTuple):
    """What is known of a batch."""

    epoch: int
    samples: list[Sample]  # of the first slots


class ShardPart(NamedTuple):
    """What a rank reads of a shard."""

    shard: int
    skip: int  # samples
    take: int  # samples, behind those


def make_loader(path: Path | str, options: LoaderOptions) -> Loader:
    """Open the shards at `path`, those of a split if there are several, and make their loader."""
    options.refuse_other_than("backend: 'webdataset'", order="full", io="cached")
    shards, counts, data = describe(str(path), options)
    shape = (options.batch_size, options.size, options.size, data.channels)
    delivery = HostDelivery(Images, shape, resolve_device(options.device))
    return Engine(data, options, TarStreams(shards, counts, options), Painter(), delivery)


class TarStreams(Source):
    """The samples of tar shards, one behind the other. `samples` of a batch count through the shards as they are named.

    Args:
        shards: Shards in the order of their names.
        counts: The number of samples in each.
        options: Options of the loader.
    """

    def __init__(self, shards: list[Shard], counts: list[int], options: LoaderOptions) -> None:
        self._shards, self._counts, self.options = shards, counts, options
        self._firsts = np.cumsum([0, *counts]).tolist()
        self._shard = shards[0]  # that is being read
        self._streams: list[BinaryIO] = []  # that are being read

    def identity(self) -> dict[str, int | str]:
        return {"world_size": self.options.world_size}

    def place(self, slots: BatchSlots, slot: int) -> Place:
        sample: Sample = slots.known.samples[slot]
        return {**locate(sample.shard), "key": sample.key}

    def explain_wait(self) -> tuple[Place, str]:
        return locate(self._shard), ""

    def interrupt(self) -> None:
        end_commands(self._streams)

    def forget_files(self) -> None:
        self._streams = []

    def close(self) -> None:
        self._streams = []

    # --- in the consumer ---

    def batches(self, engine: Engine[SlotsT], epoch: int, steps: range) -> Generator[SlotsT]:
        batch_size = self.options.batch_size
        parts = rank_parts(self._counts, self.options, epoch)
        total = sum(part.take for part in parts)
        samples = self._shuffle(parts, epoch) if self.options.train else self._stream(parts)
        stream = islice(samples, steps.start * batch_size, None)  # those before are read, not decoded
        try:
            for step in steps:
                count = max(0, min(batch_size, total - step * batch_size))
                slots = engine.delivery.new_slots(engine.positions(step), count)
                slots.tasks.append(engine.threads.read.submit(self._read, engine, epoch, slots, stream))
                yield slots
        finally:
            engine.threads.read.submit(samples.close)  # behind what it is reading

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

    def _read(self, engine: Engine[SlotsT], epoch: int, slots: SlotsT, stream: Iterator[Sample]) -> ChunkReport | None:
        """Read a batch's samples, and have them decoded."""
        if slots.abandoned:
            return None
        began = time.perf_counter()
        slots.known = StreamedBatch(epoch, list(islice(stream, slots.count)))
        engine.fill(slots)
        return ChunkReport({"read": time.perf_counter() - began}, 0)

    # --- in the decoding threads ---

    def images(self, engine: Engine[SlotsT], slots: SlotsT, chunk: slice) -> ImageChunk:
        known: StreamedBatch = slots.known
        readable: list[int] = []  # slots
        bad: dict[int, Exception] = {}
        sizes: list[tuple[int, int]] = []
        for slot in range(chunk.start, chunk.stop):
            sample = known.samples[slot]
            slots.samples[slot], slots.labels[slot] = sample.number, sample.label
            try:
                if sample.error is not None:
                    raise sample.error
                header = read_header(sample.data)
                readable.append(slot)
                sizes.append((header.width, header.height))
            except (ValueError, DatapipeError) as error:
                bad[slot] = error
        jobs = np.zeros(len(readable), JOB)
        jobs["width"], jobs["height"] = widths, heights = np.array(sizes, np.int32).reshape(-1, 2).T
        if readable:
            crops = engine.crops(known.epoch, slots.positions[readable], slots.samples[readable], widths, heights)
            jobs["box"], jobs["flip"], jobs["scale"] = crops.boxes, crops.flips, scales(crops.boxes, engine.size)
        images = ImagesInMemory(
            readable, slots.samples[readable], jobs, [known.samples[slot].data for slot in readable]
        )
        images.bad = bad
        return images


def rank_parts(counts: list[int], options: LoaderOptions, epoch: int) -> list[ShardPart]:
    """List what a rank reads in an epoch, in order. Pure.

    The ranks share the stream evenly: with `last` "drop" its whole global batches (the rest, of other shards in each
    epoch, is left out), or else all samples, so that two ranks differ by one sample at most.

    Args:
        counts: The number of samples in each shard.
        options: Options of the loader, with the rank.
        epoch: Number of the epoch, from 0.
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
