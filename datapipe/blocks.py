"""The order "blocks": large contiguous reads, each byte once, for data on a filesystem that dislikes anything else.

A block is what of a shard lies in one cell of a grid of, say, 8 MiB. The blocks of an epoch are shuffled, laid end to
end, and cut into `lanes` of equal length. Global batch `s` takes the next samples of each lane, in the order of the
lanes; within a lane, the samples of a few neighbouring blocks are shuffled. So a rank whose slice is made of whole
lanes reads its blocks alone. The number of lanes is part of the order, and of a loader's state: on another number of
ranks the same global batches follow.

Pure functions, without I/O.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .order import BLOCKS, WITHIN, Last, num_steps, permutation, uniform

MIN_LANES = 32  # as many different blocks in each global batch, where its size allows
MIN_WINDOW = 32  # blocks shuffled together, over all lanes


class Grid(NamedTuple):
    """A data set's blocks: `samples`[starts[b]:starts[b + 1]] are those of block `b`, in the order of the file."""

    samples: np.ndarray  # int64[num_samples]
    starts: np.ndarray  # int64[num_blocks + 1]


class BlockOrder(NamedTuple):
    samples: np.ndarray  # int64[positions]: the sample at each position
    runs: np.ndarray  # int64[positions]: which run it is read with; a run is a lane's part of a block


def grid(index: np.ndarray, block_bytes: int) -> Grid:
    """The blocks of an index (RECORD[num_samples])."""
    shards, offsets = index["shard"].astype(np.int64), index["offset"].astype(np.int64)
    samples = np.lexsort((offsets, shards))
    shards, cells = shards[samples], offsets[samples] // block_bytes
    first = np.ones(len(samples), bool)
    first[1:] = (shards[1:] != shards[:-1]) | (cells[1:] != cells[:-1])
    return Grid(samples, np.append(np.flatnonzero(first), len(samples)))


def longest(index: np.ndarray, blocks: Grid) -> int:
    """Bytes of the longest block, from its first sample's first to its last one's last."""
    offsets, starts = index["offset"][blocks.samples].astype(np.int64), blocks.starts[:-1]
    ends = offsets + index["size"][blocks.samples]
    return int((np.maximum.reduceat(ends, starts) - offsets[starts]).max())


def num_lanes(global_batch_size: int, world_size: int) -> int:
    """The fewest lanes, but 32 if possible, that share the global batch and are shared by the ranks evenly."""
    shares = [n for n in range(world_size, global_batch_size + 1, world_size) if global_batch_size % n == 0]
    return next((n for n in shares if n >= MIN_LANES), shares[-1])


def block_order(blocks: Grid, global_batch_size: int, last: Last, lanes: int, seed: int, epoch: int) -> BlockOrder:
    """The order of an epoch. `lanes` divides the global batch; with `last` "drop", the end is left out."""
    sizes = np.diff(blocks.starts)
    shuffled = permutation(len(sizes), seed, epoch, BLOCKS)
    sizes = sizes[shuffled]
    shift = blocks.starts[:-1][shuffled] - (np.cumsum(sizes) - sizes)
    sequence = blocks.samples[np.arange(len(blocks.samples)) + np.repeat(shift, sizes)]
    block = np.repeat(np.arange(len(sizes)), sizes)

    length = _lane_lengths(len(sequence), global_batch_size, last, lanes)
    total = int(length.sum())
    sequence, block = sequence[:total], block[:total]
    lane = np.repeat(np.arange(lanes), length)
    new = np.ones(total, bool)
    new[1:] = (lane[1:] != lane[:-1]) | (block[1:] != block[:-1])
    run = np.cumsum(new) - 1

    window = block // -(-MIN_WINDOW // lanes)
    mixed = np.lexsort((uniform(seed, epoch, WITHIN, np.arange(total), 1)[:, 0], window, lane))
    place = np.arange(total) - np.repeat(np.cumsum(length) - length, length)  # in the lane
    share = global_batch_size // lanes
    position = place // share * global_batch_size + lane * share + place % share
    samples, runs = np.empty(total, np.int64), np.empty(total, np.int64)
    samples[position], runs[position] = sequence[mixed], run[mixed]
    return BlockOrder(samples, runs)


def _lane_lengths(num_samples: int, global_batch_size: int, last: Last, lanes: int) -> np.ndarray:
    """int64[lanes]. In a last batch that is not full, the first positions are taken."""
    steps, share = num_steps(num_samples, global_batch_size, last), global_batch_size // lanes
    in_last = min(num_samples - (steps - 1) * global_batch_size, global_batch_size)
    return (steps - 1) * share + np.clip(in_last - np.arange(lanes) * share, 0, share)


def shuffle_quality(samples: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """How far an order is from that of the files; `samples` and their `labels`: int64[N] at each position.

    `displacement`: the mean distance of a sample from its place in the files, as a share of what a uniform permutation
    gives (N / 3): 1 is uniform, 0 is unshuffled. `label_runs`: the number of runs of equal labels, as a share of what
    is expected of uniform draws without replacement (Wald and Wolfowitz 1940): 1 is uniform, less is clustered.
    `neighbours`: the share of neighbouring positions whose samples are neighbours in the files; uniform: 2 / N.
    """
    total = len(samples)
    displacement = np.abs(samples - np.arange(total)).mean() / (total / 3)
    counts = np.unique(labels, return_counts=True)[1].astype(float)
    expected = 1 + (total**2 - (counts**2).sum()) / total
    runs = 1 + np.count_nonzero(labels[1:] != labels[:-1])
    neighbours = np.mean(np.abs(np.diff(samples)) == 1) if total > 1 else 0.0
    return {"displacement": float(displacement), "label_runs": float(runs / expected), "neighbours": float(neighbours)}
