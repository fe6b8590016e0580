"""The `webdataset` backend: tar shards streamed the WebDataset way, also others' shards, and the output of commands.

An epoch's shards, shuffled, are one long stream of samples, of which each rank reads an equal part, from the middle of
a shard to the middle of another. So no sample is lost, and all ranks have the same number of steps, whatever the shards
hold. For that the number of samples in each shard has to be known: from our manifest, from DALI's index beside it
(`.idx`), from a `sizes.json` (shard name to count), or by reading it once.

The order depends on the number of ranks and on the shuffle buffer; a state holds for the same number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from ..augment import scales
from ..errors import DatapipeError, DecodeError, ManifestError, MissingBackendError, ShardReadError
from ..image import decode, read_header
from ..manifest import MANIFEST, Manifest
from ..order import BUFFER, permutation, slice_positions, uniform
from ..sources.webdataset import IMAGES, LABELS, label_of
from .base import Batch, Budget, Loader, LoaderOptions, Split, device_of
from .cpu import Delivery, Images, Painter
from .filling import AHEAD, CHUNK, Wanted
from .pool import Pool, wait_for

logger = logging.getLogger(__name__)

SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples
SUFFIX = ".tar"
NUMBER = re.compile(r"\d{1,18}")  # fits into 64 bits


class Sample(NamedTuple):
    number: int  # in the stream of shards as they are named: unique
    url: str
    key: str
    label: int
    data: bytes
    error: DatapipeError | None = None  # why it is none


class Part(NamedTuple):
    """What a rank reads of a shard."""

    shard: int
    skip: int  # samples
    take: int


def open(path: str, options: LoaderOptions, device: object) -> WebDatasetLoader:
    options.only_defaults("backend: 'webdataset'", order="full", io="cached")
    urls, counts, split = _described(str(path), options)
    return WebDatasetLoader(urls, counts, split, options, device_of(device))


class WebDatasetLoader(Loader):
    """See `open_loader`. `samples` of a batch count through the shards as they are named."""

    def __init__(
        self, urls: list[str], counts: list[int], split: Split, options: LoaderOptions, device: torch.device
    ) -> None:
        super().__init__(split, options)
        self._urls, self._counts = urls, counts
        self._firsts = np.cumsum([0, *counts]).tolist()
        self._budget = Budget(options.max_bad, options.rank)
        self._delivery = Delivery((options.batch_size, self.size, self.size, self.channels), device)
        self._painter = Painter(self.channels, lambda one: decode(one.data, self.channels), self._take_bad)
        self._reading = urls[0]  # the shard that is being read
        self._pools: tuple[Pool, Pool] | None = None  # that reads, that decodes
        self._process = os.getpid()

    def identity(self) -> dict[str, int | str]:
        return {**super().identity(), "world_size": self.options.world_size}

    def close(self) -> None:
        super().close()
        if self._pools and self._process == os.getpid():
            for pool in self._pools:
                pool.close()
        self._pools = None

    # --- in the consumer ---

    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        options = self.options
        if self._pools is None or self._process != os.getpid():  # threads do not survive a fork
            self._pools, self._process = (Pool(1), Pool(options.num_threads())), os.getpid()
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
            raise DatapipeError(f"{message} (timeout_s={self.options.timeout_s:g})", path=self._reading)
        logger.warning("rank %d: %s: %s", self.options.rank, self._reading, message)

    # --- in the reading thread ---

    def _stream(self, parts: list[Part]) -> Generator[Sample]:
        for shard, skip, take in parts:
            self._reading = url = self._urls[shard]
            found, samples, count = 0, samples_of(url), self._counts[shard]
            for found, sample in enumerate(islice(samples, skip, skip + take), 1):
                if skip + found == count and next(samples, None) is not None:
                    raise ShardReadError(f"holds more than the {count} samples that were noted of it", path=url)
                yield sample._replace(number=self._firsts[shard] + skip + found - 1)
            if found < take:
                raise ShardReadError(f"ends after {skip + found} samples of {count}", path=url)
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
            Wanted(slot, sample.number, sample.data, box, n, flip)
            for (slot, sample, _, _), box, n, flip in zip(
                read, windows.boxes.tolist(), scale, windows.flips.tolist(), strict=True
            )
        ]
        self._painter.put(slots, wanted)

    def _take_bad(self, slots: _Stream, slot: int, error: Exception) -> None:
        sample = slots.taken[slot]
        if not isinstance(error, DatapipeError):
            error = DecodeError(str(error), path=sample.url, key=sample.key)
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


def samples_of(url: str) -> Generator[Sample]:
    """A shard's samples, through the webdataset library. Raises ShardReadError."""
    webdataset = _backend()
    try:
        for parts in webdataset.tariterators.tarfile_samples([{"url": url}], handler=webdataset.reraise_exception):
            try:
                sample = _sample(url, parts)
            except DatapipeError as error:
                sample = Sample(-1, url, parts["__key__"], 0, b"", error)
            yield sample
    except Exception as error:  # of tarfile, of the command, of the filesystem
        raise ShardReadError(f"cannot be read: {error}", path=url) from error


def _sample(url: str, parts: dict) -> Sample:
    key = parts["__key__"]
    image = next((parts[name] for name in IMAGES if name in parts), None)
    if image is None:
        found = ", ".join(name for name in parts if not name.startswith("__"))
        raise DecodeError(f"has no image ({', '.join(IMAGES)}), but {found}", path=url, key=key)
    label = label_of(url, key, {name: {key: parts[name]} if name in parts else {} for name in LABELS})
    if not NUMBER.fullmatch(label):
        message = f"its label is no number of a class, {label!r}: `datapipe pack` numbers names"
        raise DecodeError(message, path=url, key=key)
    return Sample(-1, url, key, int(label), image)


def _described(path: str, options: LoaderOptions) -> tuple[list[str], list[int], Split]:
    """Shards, their counts, and what is known of their images. Raises ManifestError."""
    _backend()
    folder = Path(path)
    if folder.is_dir() and (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        if manifest.format != "tar":
            raise ManifestError(f"holds {manifest.format} shards; backend webdataset reads tar", path=folder)
        urls = [str(folder / shard.name) for shard in manifest.shards]
        counts = [shard.num_samples for shard in manifest.shards]
        size = manifest.width, manifest.height
        smallest = size if None not in size else None
        split = Split(sum(counts), manifest.num_classes, manifest.channels, *size, smallest, _checksum(urls, counts))
        return urls, counts, split._replace(classes=tuple(manifest.classes))
    if folder.is_dir():
        urls = sorted(str(file) for file in folder.iterdir() if file.suffix == SUFFIX)
    else:
        import braceexpand

        urls = [url for part in path.split("::") for url in braceexpand.braceexpand(part)]
    if not urls:
        raise ManifestError("holds no tar shards", path=folder)
    counts = _counted(urls, options)
    if not sum(counts):
        raise ManifestError("its tar shards hold no samples", path=path)
    return urls, counts, Split(sum(counts), None, 3, None, None, None, _checksum(urls, counts))


def _checksum(urls: list[str], counts: list[int]) -> str:
    names = [(url.rpartition("/")[2], count) for url, count in zip(urls, counts, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(names).encode())


def _counted(urls: list[str], options: LoaderOptions) -> list[int]:
    """Samples in each shard. Ranks that can talk to each other share the work."""
    distributed = torch.distributed
    shared = options.world_size > 1 and distributed.is_available() and distributed.is_initialized()
    if not shared:
        return [_count(url) for url in urls]
    counts, error = {}, None
    try:
        counts = {i: _count(urls[i]) for i in range(options.rank, len(urls), options.world_size)}
    except DatapipeError as caught:  # all ranks take part in what follows, or those that do would wait for ever
        error = caught
    gathered: list = [None] * options.world_size
    distributed.all_gather_object(gathered, (counts, error))
    for of_rank, failed in gathered:
        if failed is not None:
            raise failed
        counts |= of_rank
    return [counts[i] for i in range(len(urls))]


def _count(url: str) -> int:
    noted = _noted(url)
    if noted is not None:
        return noted
    logger.info("counting the samples of %s, once", url)
    return sum(1 for _ in samples_of(url))


def _noted(url: str) -> int | None:
    """What a file beside a shard says of its samples."""
    shard = Path(url)
    sizes, index = shard.with_name("sizes.json"), shard.with_suffix(".idx")
    try:
        if index.exists():
            with index.open() as file:
                count = int(file.readline().split()[1])
        elif sizes.exists():
            count = int(json.loads(sizes.read_text())[shard.name])
        else:
            return None
        if count >= 0:
            return count
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass
    logger.warning("%s: the number of samples beside it cannot be read", url)
    return None


def _backend():
    try:
        import webdataset

        return webdataset
    except ImportError as error:
        raise MissingBackendError("webdataset is not installed: pip install datapipe-trainer[webdataset]") from error
