"""The `webdataset` backend: tar shards streamed the WebDataset way, also others' shards, and the output of commands.

An epoch's shards, shuffled, are one long stream of samples, of which each rank reads an equal part, from the middle of
a shard to the middle of another. So no sample is lost, and all ranks have the same number of steps, whatever the shards
hold. For that the number of samples in each shard has to be known: from our manifest, from DALI's index beside it
(`.idx`), from a `sizes.json` (shard name to count), or by reading it once.

A shard is a file (a Path) or a URL (a str). Only what the user himself gave is ever a URL, which the webdataset library
opens and may run as a command: what a folder or a manifest names is a file, whatever it is called.

The order depends on the number of ranks and on the shuffle buffer; a state holds for the same number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
from .pool import Pool, in_time, wait_for

logger = logging.getLogger(__name__)

COUNTED = 100  # samples counted at a time: that takes less than `timeout_s`, where the whole shard may not
SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples
SUFFIX = ".tar"
NUMBER = re.compile(r"\d{1,18}")  # fits into 64 bits

Shard = Path | str


class Sample(NamedTuple):
    number: int  # in the stream of shards as they are named: unique
    shard: Shard
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
    shards, counts, split = _described(str(path), options)
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
            _end_commands(self._streams)
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
            raise DatapipeError(f"{message} (timeout_s={self.options.timeout_s:g})", **_place(self._reading))
        logger.warning("rank %d: %s: %s", self.options.rank, self._reading, message)

    # --- in the reading thread ---

    def _stream(self, parts: list[Part]) -> Generator[Sample]:
        for number, skip, take in parts:
            self._reading = shard = self._shards[number]
            found, samples, count = 0, samples_of(shard, self._streams), self._counts[number]
            for found, sample in enumerate(islice(samples, skip, skip + take), 1):
                if skip + found == count and next(samples, None) is not None:
                    raise ShardReadError(f"holds more than the {count} samples that were noted of it", **_place(shard))
                yield sample._replace(number=self._firsts[number] + skip + found - 1)
            if found < take:
                raise ShardReadError(f"ends after {skip + found} samples of {count}", **_place(shard))
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
            error = DecodeError(str(error), **_place(sample.shard), key=sample.key)
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


def samples_of(shard: Shard, streams: list[BinaryIO]) -> Generator[Sample]:
    """A shard's samples, through the webdataset library. What they are read from is among the `streams` meanwhile.

    Raises ShardReadError.
    """
    tar = _backend().tariterators
    stream, after = None, ""
    try:
        stream = shard.open("rb") if isinstance(shard, Path) else tar.gopen.gopen(shard)
        streams.append(stream)
        members = tar.tar_file_expander([{"url": str(shard), "stream": stream}], handler=tar.reraise_exception)
        for parts in tar.group_by_keys(members, handler=tar.reraise_exception):
            after = f" after key {parts['__key__']}"
            try:
                sample = _sample(shard, parts)
            except DatapipeError as error:
                sample = Sample(-1, shard, parts["__key__"], 0, b"", error)
            yield sample
    except Exception as error:  # of tarfile, of the command, of the filesystem
        raise ShardReadError(f"cannot be read{after}: {error}", **_place(shard)) from error
    finally:
        if stream is not None:
            with suppress(Exception):  # a command that has more to say fails here
                stream.close()
            streams.remove(stream)


def _sample(shard: Shard, parts: dict) -> Sample:
    key = parts["__key__"]
    image = next((parts[name] for name in IMAGES if name in parts), None)
    if image is None:
        found = ", ".join(name for name in parts if not name.startswith("__"))
        raise DecodeError(f"has no image ({', '.join(IMAGES)}), but {found}", **_place(shard), key=key)
    label = label_of(str(shard), key, {name: {key: parts[name]} if name in parts else {} for name in LABELS})
    if not NUMBER.fullmatch(label):
        message = f"its label is no number of a class, {label!r}: `datapipe pack` numbers names"
        raise DecodeError(message, **_place(shard), key=key)
    return Sample(-1, shard, key, int(label), image)


def _place(shard: Shard) -> dict[str, Path | str]:
    """Where an error of the shard is, for DatapipeError."""
    return {"path": shard.parent, "shard": shard.name} if isinstance(shard, Path) else {"path": shard}


def _end_commands(streams: Iterable[BinaryIO]) -> None:
    """End the commands behind URLs: one that hangs would outlive this process, and keep its standard error open."""
    for stream in list(streams):
        command = getattr(stream, "proc", None)
        if command is not None and command.poll() is None:
            for process in _descendants(command.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)


def _descendants(process: int) -> list[int]:
    """A process, and all that it and its children began: what a shell runs does not end with the shell."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not list them
        children = []
    return [process, *(each for child in children for each in _descendants(int(child)))]


def _described(path: str, options: LoaderOptions) -> tuple[list[Shard], list[int], Split]:
    """Shards, their counts, and what is known of their images. Raises ManifestError."""
    _backend()
    shards, manifest = in_time(options.timeout_s, path, "opening the data set", _listed, path)
    if manifest is not None:
        counts = [shard.num_samples for shard in manifest.shards]
        size = manifest.width, manifest.height
        smallest = size if None not in size else None
        split = Split(sum(counts), manifest.num_classes, manifest.channels, *size, smallest, _checksum(shards, counts))
        return shards, counts, split._replace(classes=tuple(manifest.classes))
    if not shards:
        raise ManifestError("holds no tar shards", path=path)
    counts = _counted(shards, options)
    if not sum(counts):
        raise ManifestError("its tar shards hold no samples", path=path)
    return shards, counts, Split(sum(counts), None, 3, None, None, None, _checksum(shards, counts))


def _listed(path: str) -> tuple[list[Shard], Manifest | None]:
    folder = Path(path)
    if not folder.is_dir():
        import braceexpand

        return [url for part in path.split("::") for url in braceexpand.braceexpand(part)], None
    if not (folder / MANIFEST).exists():
        return sorted(file for file in folder.iterdir() if file.suffix == SUFFIX), None
    manifest = Manifest.read(folder)
    if manifest.format != "tar":
        raise ManifestError(f"holds {manifest.format} shards; backend webdataset reads tar", path=folder)
    return [folder / shard.name for shard in manifest.shards], manifest


def _checksum(shards: list[Shard], counts: list[int]) -> str:
    names = [(str(shard).rpartition("/")[2], count) for shard, count in zip(shards, counts, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(names).encode())


def _counted(shards: list[Shard], options: LoaderOptions) -> list[int]:
    """Samples in each shard. Ranks that can talk to each other share the work."""
    distributed = torch.distributed
    shared = options.world_size > 1 and distributed.is_available() and distributed.is_initialized()
    if not shared:
        return [_count(shard, options.timeout_s) for shard in shards]
    counts, error = {}, None
    try:
        mine = range(options.rank, len(shards), options.world_size)
        counts = {i: _count(shards[i], options.timeout_s) for i in mine}
    except DatapipeError as caught:  # all ranks take part in what follows, or those that do would wait for ever
        error = caught
    gathered: list = [None] * options.world_size
    distributed.all_gather_object(gathered, (counts, error))
    for of_rank, failed in gathered:
        if failed is not None:
            raise failed
        counts |= of_rank
    return [counts[i] for i in range(len(shards))]


def _count(shard: Shard, timeout_s: float) -> int:
    noted = in_time(timeout_s, shard, "counting its samples", _noted, shard)
    if noted is not None:
        return noted
    logger.info("counting the samples of %s, once", shard)
    streams: list[BinaryIO] = []
    samples, count = samples_of(shard, streams), 0
    try:
        while more := in_time(timeout_s, shard, "counting its samples", _count_some, samples):
            count += more
    except BaseException:
        _end_commands(streams)
        raise
    return count


def _count_some(samples: Iterator[Sample]) -> int:
    return sum(1 for _ in islice(samples, COUNTED))


def _noted(shard: Shard) -> int | None:
    """What a file beside a shard says of its samples."""
    beside = Path(shard)
    sizes, index = beside.with_name("sizes.json"), beside.with_suffix(".idx")
    try:
        if index.exists():
            with index.open() as file:
                count = int(file.readline().split()[1])
        elif sizes.exists():
            count = int(json.loads(sizes.read_text())[beside.name])
        else:
            return None
        if count >= 0:
            return count
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass
    logger.warning("%s: the number of samples beside it cannot be read", shard)
    return None


def _backend():
    try:
        import webdataset

        return webdataset
    except ImportError as error:
        raise MissingBackendError("webdataset is not installed: pip install datapipe-trainer[webdataset]") from error
