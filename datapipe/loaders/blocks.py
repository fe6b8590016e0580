"""Samples of a packed data set in the order "blocks": each byte is read once per epoch, in large reads."""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np

from ..dataset import DataSet
from ..dataset.shard_files import room_for
from ..dataset.shard_reader import SLACK
from ..sampling.block_order import BlockOrder, grid, longest
from ..sampling.cached_blocks import HORIZON, NextUses
from .batch_memory import BatchMemory
from .block_reads import RankReads, ReadFrom
from .engine import Engine, SlotsT
from .image_chunk import BlockedImages, ImageChunk
from .indexed import IndexedSource
from .options import LoaderOptions

READERS = 4  # threads that read blocks ahead: the others continue while the filesystem answers one


class BlockSource(IndexedSource):
    """The samples of a packed data set in the order "blocks". See `IndexedSource`."""

    num_readers = READERS

    def __init__(self, data_set: DataSet, options: LoaderOptions) -> None:
        super().__init__(data_set, options)
        self._turns: dict[int, np.ndarray] = {}  # by epoch: `BlockOrder.turns` of this node
        self._block_bytes = options.block_mib << 20
        self._grid = grid(data_set.index, self._block_bytes)
        more = self._block_bytes // SLACK if data_set.local else 0
        room = room_for(longest(data_set.index, self._grid) + more)
        self._memory = BatchMemory((room,), pinned=False)

    def batches(self, engine: Engine[SlotsT], epoch: int, steps: range) -> Generator[SlotsT]:
        options, data_set = self.options, self.data_set
        order = self._order(epoch, engine.lanes)
        needs = order.needs(options.rank, options.world_size, steps)
        kept = data_set.slots
        cache = (kept, self._next_uses(kept.num_slots, epoch, engine.lanes)) if kept else None
        source = ReadFrom(data_set.reader, data_set.index, self._block_bytes, self._memory)
        reads = RankReads(source, order, needs, engine.threads.read, cache)
        try:
            for step in steps:
                positions = engine.positions(step)
                samples, numbers = order.at(positions[positions < len(order)])
                slots = self.start(engine, epoch, positions, samples)
                slots.known = slots.known, reads.begin(step, numbers.tolist())
                engine.fill(slots)
                yield slots
        finally:
            reads.end()

    def images(self, engine: Engine[SlotsT], slots: SlotsT, chunk: slice) -> ImageChunk:
        plan, reads = slots.known
        samples, shards, jobs = plan.result()
        numbers = range(chunk.start, chunk.stop)
        return BlockedImages(numbers, samples[chunk], jobs[chunk], self.data_set, shards[chunk], reads[chunk])

    def _order(self, epoch: int, lanes: int) -> BlockOrder:
        options = self.options
        return BlockOrder(self._grid, options.global_batch_size, options.last_batch, lanes, options.seed, epoch)

    def _next_uses(self, num_slots: int, epoch: int, lanes: int) -> NextUses:
        ranks, world_size = self.options.ranks_of_node(), self.options.world_size
        epochs_held = num_slots / (len(self._grid.starts) - 1) * world_size / len(ranks)
        for number in range(epoch, epoch + min(math.ceil(epochs_held) + 1, HORIZON) + 1):
            if number not in self._turns:
                self._turns[number] = self._order(number, lanes).turns(ranks, world_size)
        self._turns = {number: turns for number, turns in self._turns.items() if number >= epoch}
        return NextUses(self._turns.__getitem__, epoch, math.ceil(epochs_held) + 1)
