"""The `webdataset` backend: tar shards streamed the WebDataset way, also others' shards, and the output of commands.

An epoch's shards, shuffled, are one long stream of samples, of which each rank reads an equal part, from the middle of
a shard to the middle of another. So no sample is lost, and all ranks have the same number of steps, whatever the shards
hold. For that the number of samples in each shard has to be known: from our manifest, from DALI's index beside it
(`.idx`), from a `sizes.json` (shard name to count), or by reading it once.

The order depends on the number of ranks and on the shuffle buffer; a state holds for the same number of ranks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from ..errors import DatapipeError, DecodeError, ShardReadError
from ..images.codec import decode, read_header
from ..sampling.augment import scales
from ..sampling.order import BUFFER, permutation, slice_positions, uniform
from .base import Batch, Budget, Loader, LoaderOptions, Split, device_of
from .cpu import Delivery, Images, Painter
from .tar_streams import Sample, Shard, describe, end_commands, place, samples_of
from .threaded import AHEAD, CHUNK, Wanted
from .threads import Pool, wait_for

logger = logging.getLogger(__name__)

SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples


class Part(NamedTuple):
    """What a rank reads of a shard."""

    shard: int
    skip: int  # samples
    take: int


def open(path: str, options: LoaderOptions, device: object) -> WebDatasetLoader:
    options.only_defaults("backend: 'webdataset'", order="full", io="cached")
    shards, counts, split = describe(str(path), options)
    return WebDatasetLoader(shards, counts, split, options, device_of(device))


class WebDatasetLoader(Loader):
    """See `open_loader`. `samples` of a batch count through the shards as they are named."""

    def __init__(
        self, shards: list[Shard], counts: list[int], split: Split, options: LoaderOptions, device: torch.device
    ) -> None:
        super().__init__(split, options)
        self._shards, self._counts = shards, counts
        self._firsts = np.cumsum([0, *counts]).tolist()
        self._budget = Budget(options.max_bad, options.rank)
        self._delivery = Delivery((options.batch_size, self.size, self.size, self.channels), device)
        self._painter = Painter(self.channels, lambda one: decode(one.data, self.channels), self._take_bad)
        self._reading = shards[0]
        self._streams: list[BinaryIO] = []  # that are being read
        self._pools: tuple[Pool, Pool] | None = None  # that reads, that decodes
        self._process = os.getpid()

    def identity(self) -> dict[str, int | str]:
        return {**super().identity(), "world_size": self.options.world_size}

    def close(self) -> None:
        super().close()
        if self._pools and self._process == os.getpid():
            end_commands(self._streams)
            for pool in self._pools:
                pool.close()
        self._pools = None

    # --- in the consumer ---

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        options = self.options
        if self._pools is None or self._process != os.getpid():  # threads do not survive a fork
            self._pools, self._process = (Pool(1), Pool(options.num_threads())), os.getpid()
            self._streams = []
        parts = rank_parts(self._counts, options, epoch)
        total = sum(part.take for part in parts)
        samples = self._shuffled(parts, epoch) if options.train else self._stream(parts)
        stream = islice(samples, steps.start * options.batch_size, None)  # read over, not decoded
        under_way: deque[tuple[Images, Future]] = deque()
        upcoming, (reader, _) = iter(steps), self._pools
        try:
            while True:
                while len(under_way) < AHEAD and (step := next(upcoming, None)) is not None:
                    count = max(0, min(options.batch_size, total - step * options.batch_size))
                    positions = slice_positions(step, options.batch_size, options.rank, options.world_size)
                    slots = _Stream(positions, count, self._delivery.memory.take())
                    under_way.append((slots, reader.submit(self._read, epoch, slots, stream, count)))
                if not under_way:
                    return
                slots, reading = under_way.popleft()
                for filling in wait_for(reading, options.timeout_s, self._tell):
                    wait_for(filling, options.timeout_s, self._tell)
                yield self._delivery.batch(slots)
                del slots, reading
        finally:
            for slots, reading in under_way:
                slots.abandoned = True
                reading.cancel()
            reader.submit(samples.close)  # behind what it is reading
            self._delivery.drain()

    def _tell(self, waited_s: float, is_over: bool) -> None:
        message = f"waiting for a batch for {waited_s:.0f} s"
        if is_over:
            raise DatapipeError(f"{message} (timeout_s={self.options.timeout_s:g})", **place(self._reading))
        logger.warning("rank %d: %s: %s", self.options.rank, self._reading, message)

    # --- in the reading thread ---

    def _stream(self, parts: list[Part]) -> Generator[Sample]:
        for number, skip, take in parts:
            self._reading = shard = self._shards[number]
            found, samples, count = 0, samples_of(shard, self._streams), self._counts[number]
            for found, sample in enumerate(islice(samples, skip, skip + take), 1):
                if skip + found == count and next(samples, None) is not None:
                    raise ShardReadError(f"holds more than the {count} samples that were noted of it", **place(shard))
                yield sample._replace(number=self._firsts[number] + skip + found - 1)
            if found < take:
                raise ShardReadError(f"ends after {skip + found} samples of {count}", **place(shard))
            samples.close()

    def _shuffled(self, parts: list[Part], epoch: int) -> Generator[Sample]:
        """Each sample drawn from the next thousand."""
        options, held = self.options, []
        stream, drawn = self._stream(parts), options.rank << 32
        while True:
            held += islice(stream, SHUFFLED - len(held))
            if not held:
                return
            (draw,) = uniform(options.seed, epoch, BUFFER, np.array([drawn]), 1)[0]
            drawn += 1
            at = int(draw * len(held))
            held[at], held[-1] = held[-1], held[at]
            yield held.pop()

    def _read(self, epoch: int, slots: _Stream, stream: Iterator[Sample], count: int) -> list[Future]:
        if slots.abandoned:
            return []
        taken = list(islice(stream, count))
        chunks = (range(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK))
        slots.images[count:] = 0
        return [self._pools[1].submit(self._fill, epoch, slots, chunk, taken) for chunk in chunks]

    # --- in the decoding threads ---

    def _fill(self, epoch: int, slots: _Stream, chunk: range, taken: list[Sample]) -> None:
        read = []
        for slot in chunk:
            sample = taken[slot]
            slots.taken[slot] = sample
            slots.samples[slot], slots.labels[slot] = sample.number, sample.label
            try:
                if sample.error is not None:
                    raise sample.error
                header = read_header(sample.data)
                read.append((slot, sample, header.width, header.height))
            except (ValueError, DatapipeError) as error:
                self._take_bad(slots, slot, error)
        if not read:
            return
        places, _, widths, heights = zip(*read, strict=True)
        windows = self._windows(epoch, slots.positions[list(places)], np.array(widths), np.array(heights))
        scale = scales(windows.boxes, self.size).tolist()
        wanted = [
            Wanted(slot, sample.number, sample.data, (width, height), box, n, flip)
            for (slot, sample, width, height), box, n, flip in zip(
                read, windows.boxes.tolist(), scale, windows.flips.tolist(), strict=True
            )
        ]
        self._painter.put(slots, wanted)

    def _take_bad(self, slots: _Stream, slot: int, error: Exception) -> None:
        sample = slots.taken[slot]
        if not isinstance(error, DatapipeError):
            error = DecodeError(str(error), **place(sample.shard), key=sample.key)
        self._budget.spend(sample.number, error)
        slots.images[slot] = 0
        slots.valid[slot] = False


class _Stream(Images):
    """A batch whose samples are known when they were read."""

    def __init__(self, positions: np.ndarray, count: int, images: np.ndarray) -> None:
        super().__init__(positions, np.empty(0, np.int64))
        self.valid[:count] = True
        self.images = images
        self.taken: dict[int, Sample] = {}


def rank_parts(counts: list[int], options: LoaderOptions, epoch: int) -> list[Part]:
    """What a rank reads in an epoch, in order. Pure.

    The stream is cut into equal parts: with `last` "drop" of whole batches (of which the end, of other shards in each
    epoch, is left out), else of all samples, so that parts differ by one sample at most.
    """
    order = permutation(len(counts), options.seed, epoch).tolist() if options.train else range(len(counts))
    total, ranks = sum(counts), options.world_size
    if options.last == "drop":
        total = total // options.global_batch_size * options.global_batch_size
    first, stop = total * options.rank // ranks, total * (options.rank + 1) // ranks
    parts, at = [], 0
    for shard in order:
        low, high = max(first, at), min(stop, at + counts[shard])
        if low < high:
            parts.append(Part(shard, low - at, high - low))
        at += counts[shard]
    return parts
