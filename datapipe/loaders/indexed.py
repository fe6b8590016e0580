"""Samples of a packed data set, read by the index.

Samples, crops and flips are pure functions of positions. One thread works them out for each batch, before others need
them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import clock, watched
from ..dataset import DataSet
from ..errors import SettingError
from ..native import JOB
from ..sampling.augment import scales
from .base import Order, Place
from .batch_slots import BatchSlots, SlotsT
from .engine import AHEAD, Engine, SampleSource
from .epoch_plan import EpochPart
from .image_chunk import BatchPlan, ImageChunk, IndexedChunk
from .options import LoaderOptions

# Reads are slow that take this share of the threads' time, and are slower than from the page cache.
SLOW_SHARE, SLOW_BYTES_PER_S = 0.25, 1e9


@contextmanager
def open_for_loader(path: Path | str, options: LoaderOptions, local: Path | None) -> Iterator[DataSet]:
    """Open a data set within the time limit, for a loader to be made of it, which closes it.

    It is closed here if the block fails, which makes the loader.

    Args:
        path: The data set's folder.
        options: Options of the loader.
        local: The folder to which the data set is being copied.

    Yields:
        The data set.

    Raises:
        DatapipeError: The data set cannot be opened, or not within `timeout_s`.
    """
    data_set = watched.call(
        lambda: DataSet(path, options.io, options.retries, local), options.timeout_s, path, "opening the data set"
    )
    try:
        yield data_set
    except BaseException:
        data_set.close()
        raise


class IndexedSource(SampleSource):
    """The samples of a packed data set in the order "full", or one behind the other. It closes the data set.

    Raises SettingError for options that do not fit the data set's copy.
    """

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        self.data_set, self.options = data_set, options
        self._hints: list[Future[None]] = []
        if data_set.slots and options.train and options.order != "blocks":
            message = f"order: {options.order!r} has no use for a part of the data set"
            raise SettingError(f"{message}, which is all that {data_set.local} has room for; allowed: blocks")
        if data_set.slots and data_set.slots.block_bytes != options.block_mib << 20:
            staged = data_set.slots.block_bytes >> 20
            raise SettingError(f"block_mib: {options.block_mib} is not what {data_set.local} was made for: {staged}")

    def close(self) -> None:
        self.data_set.close()

    def place(self, slots: BatchSlots, slot: int) -> Place:
        sample, data_set = int(slots.samples[slot]), self.data_set
        shard = data_set.manifest.shards[data_set.index[sample]["shard"]].name
        return {"path": data_set.folder, "shard": shard, "key": data_set.key(sample)}

    def explain_wait(self) -> tuple[Place, str]:
        read = self.data_set.reader.oldest()
        if read is None:
            return {"path": self.data_set.folder}, ""
        place: Place = {"path": read.path.parent, "shard": read.path.name}
        if read.problem:
            return place, f"; {read.problem}; it is being tried again"
        return place, f"; a read at {read.offset} has not answered for {clock.now() - read.since:.0f} s"

    def interrupt(self) -> None:
        self.data_set.reader.close()

    def forget_files(self) -> None:
        self._hints = []
        self.data_set.forget_files()

    # --- in the consumer ---

    def batches(self, engine: Engine[SlotsT], part: EpochPart, plan: Any) -> Generator[SlotsT]:
        order: Order = plan
        for step in part.steps:
            positions = engine.positions(step)
            slots = self.start(engine, part.epoch, positions, order[positions[positions < len(order)]])
            if _reads_slowly(engine):
                self._hints = [hint for hint in self._hints if not hint.done()]
                if len(self._hints) < AHEAD:  # a hint that comes too late is useless, and would keep a batch's memory
                    self._hints.append(engine.threads.read.submit(self._hint, slots))
            engine.fill(slots)
            yield slots

    def start(self, engine: Engine[SlotsT], epoch: int, positions: np.ndarray, samples: np.ndarray) -> SlotsT:
        """Make slots for a batch, and have it worked out what belongs into them.

        Args:
            engine: Engine that fills the slots.
            epoch: Number of the epoch, from 0.
            positions: Positions in the epoch, int64[batch_size].
            samples: The numbers of the samples at the first of the positions; the others have none.

        Returns:
            The slots. What is `known` of them is the BatchPlan, once it is made.
        """
        slots = engine.delivery.new_slots(positions, len(samples))
        slots.samples[: len(samples)] = samples
        slots.known = engine.threads.plan.submit(self._plan, engine, epoch, slots)
        return slots

    # --- in the threads ---

    def plan_epoch(self, engine: Engine[SlotsT], part: EpochPart) -> Any:
        return engine.full_order(part.epoch)

    def images(self, engine: Engine[SlotsT], slots: SlotsT, chunk: slice) -> ImageChunk:
        return IndexedChunk(slots.known.result(), chunk, self.data_set)

    def _hint(self, slots: BatchSlots) -> None:
        """Tell the kernel what will be read.

        It may ask the filesystem's server first, and so must not be asked by the consumer.
        """
        _, shards, jobs = slots.known.result()
        for shard, offset, size in zip(shards, jobs["offset"].tolist(), jobs["size"].tolist(), strict=True):
            if slots.abandoned:
                return
            self.data_set.reader.will_read(shard, offset, size)

    def _plan(self, engine: Engine[SlotsT], epoch: int, slots: BatchSlots) -> BatchPlan:
        samples, positions = slots.samples[: slots.count], slots.positions[: slots.count]
        jobs = np.zeros(len(samples), JOB)
        if not len(samples):
            return BatchPlan(samples, [], jobs)
        records = self.data_set.index[samples]
        slots.labels[: len(samples)] = records["label"]
        crops = engine.crops(epoch, positions, samples, records["width"], records["height"])
        for name in ("offset", "size", "checksum", "width", "height"):
            jobs[name] = records[name]
        jobs["has_checksum"] = True
        jobs["box"], jobs["flip"], jobs["scale"] = crops.boxes, crops.flips, scales(crops.boxes, engine.size)
        return BatchPlan(samples, records["shard"].tolist(), jobs)


def _reads_slowly(engine: Engine[SlotsT]) -> bool:
    """Return whether reads take so long that hints to the kernel, two batches ahead, are worth their calls."""
    read_s = engine.stage_s["read"]
    return read_s > SLOW_SHARE * sum(engine.stage_s.values()) and engine.read_bytes < SLOW_BYTES_PER_S * read_s
