"""Tar shards as streams of samples, through the webdataset library: the source of the backend of that name.

A shard is a file (a Path) or a URL (a str). Only what users themselves give is ever a URL, which the library opens and
may run as a command: what a folder or a manifest names is a file, whatever it is called.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..errors import DatapipeError, DecodeError, MissingBackendError, ShardReadError
from ..formats.naming import IMAGES, LABELS, read_fields
from ..images.codec import read_header
from ..native import JOB
from ..sampling.augment import scales
from ..sampling.order import BUFFER, permutation, uniform
from .base import Place
from .batch_slots import BatchSlots, ChunkReport, SlotsT
from .engine import Engine, SampleSource
from .epoch_plan import EpochPart
from .image_chunk import ChunkInMemory, ImageChunk
from .options import LoaderOptions

_SHUFFLED = 1000  # samples that the next one is drawn from, as in WebDataset's examples
_CLASS_NUMBER = re.compile(r"\d{1,18}")  # fits into 64 bits

TarShard = Path | str


class Sample(NamedTuple):
    """A sample of a stream, or why there is none."""

    number: int  # in the stream of shards as they are named: unique
    shard: TarShard
    key: str
    label: int
    data: bytes
    error: DatapipeError | None = None  # why it has no image, or no label


def read_samples(shard: TarShard, streams: list[BinaryIO]) -> Generator[Sample]:
    """Read a shard's samples, through the webdataset library. What is being read is one of the `streams` meanwhile.

    Raises ShardReadError.
    """
    tar = import_webdataset().tariterators
    stream, after = None, ""
    try:
        stream = shard.open("rb") if isinstance(shard, Path) else tar.gopen.gopen(shard)
        streams.append(stream)
        members = tar.tar_file_expander([{"url": str(shard), "stream": stream}], handler=tar.reraise_exception)
        for parts in tar.group_by_keys(members, handler=tar.reraise_exception):
            after = f" after key {parts['__key__']}"
            try:
                sample = _read_sample(shard, parts)
            except DatapipeError as error:
                sample = Sample(-1, shard, parts["__key__"], 0, b"", error)
            yield sample
    except Exception as error:  # of tarfile, of the command, of the filesystem
        raise ShardReadError(f"cannot be read{after}: {error}", **locate(shard)) from error
    finally:
        if stream is not None:
            with suppress(Exception):  # a command that has more to say fails here
                stream.close()
            streams.remove(stream)


def _read_sample(shard: TarShard, parts: dict) -> Sample:
    key = parts["__key__"]
    place: Place = {**locate(shard), "key": key}
    image = next((parts[name] for name in IMAGES if name in parts), None)
    if image is None:
        names = ", ".join(name for name in parts if not name.startswith("__"))
        raise DecodeError(f"has no image ({', '.join(IMAGES)}), but {names}", **place)
    label, _ = read_fields(str(shard), key, {name: parts[name] for name in LABELS if name in parts})
    if not _CLASS_NUMBER.fullmatch(label):
        message = f"its label is not the number of a class, {label!r}: `datapipe pack` numbers names"
        raise DecodeError(message, **place)
    return Sample(-1, shard, key, int(label), image)


def locate(shard: TarShard) -> Place:
    """Say where an error of the shard is."""
    return {"path": shard.parent, "shard": shard.name} if isinstance(shard, Path) else {"path": shard}


def end_commands(streams: Iterable[BinaryIO]) -> None:
    """End the commands behind URLs: one that hangs would outlive this process, and keep its standard error open."""
    for stream in list(streams):
        command = getattr(stream, "proc", None)
        if command is not None and command.poll() is None:
            for process in _descendants(command.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)


def _descendants(process: int) -> list[int]:
    """List a process, and all that it and its children began: what a shell runs does not end with the shell."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not list them
        children = []
    return [process, *(each for child in children for each in _descendants(int(child)))]


class StreamedBatch(NamedTuple):
    """What is known of a batch."""

    epoch: int
    samples: list[Sample]  # of the first slots


class ShardPart(NamedTuple):
    """What a rank reads of a shard."""

    shard: int
    skip: int  # samples
    take: int  # samples, behind those


class TarStreams(SampleSource):
    """The samples of tar shards, one behind the other. `samples` of a batch count through the shards as they are named.

    The shards are in the order of their names, and `counts` the number of samples in each.
    """

    def __init__(self, shards: list[TarShard], counts: list[int], options: LoaderOptions) -> None:
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

    # --- in the consumer ---

    def batches(self, engine: Engine[SlotsT], part: EpochPart, plan: Any) -> Generator[SlotsT]:
        batch_size, (epoch, _, steps) = self.options.batch_size, part
        parts: list[ShardPart] = plan
        total = sum(shard.take for shard in parts)
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

    # --- in the threads ---

    def plan_epoch(self, engine: Engine[SlotsT], part: EpochPart) -> Any:
        return rank_parts(self._counts, self.options, part.epoch)

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
            buffer += islice(stream, _SHUFFLED - len(buffer))
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
        images = ChunkInMemory(readable, slots.samples[readable], jobs, [known.samples[slot].data for slot in readable])
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


def import_webdataset() -> ModuleType:
    """Return the webdataset library. Raises MissingBackendError."""
    try:
        import webdataset

        return webdataset
    except ImportError as error:
        raise MissingBackendError.for_extra("webdataset is not installed", "webdataset") from error
