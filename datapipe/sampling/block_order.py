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


def grid(index: np.ndarray, block_bytes: int) -> Grid:
    """The blocks of an index (RECORD[num_samples])."""
    shards, offsets = index["shard"], index["offset"]
    same = shards[1:] == shards[:-1]
    if ((shards[1:] > shards[:-1]) | (same & (offsets[1:] >= offsets[:-1]))).all():
        samples = np.arange(len(index))  # as `pack` writes them: no need to sort
    else:
        samples = np.lexsort((offsets, shards))
        shards, offsets = shards[samples], offsets[samples]
        same = shards[1:] == shards[:-1]
    cells = offsets // np.uint64(block_bytes)
    first = np.flatnonzero(~same | (cells[1:] != cells[:-1])) + 1
    return Grid(samples, np.concatenate([[0], first, [len(samples)]]))


def longest(index: np.ndarray, blocks: Grid) -> int:
    """Bytes of the longest block, from its first sample's first to its last one's last."""
    ends = (index["offset"] + index["size"])[blocks.samples]
    starts = blocks.starts[:-1]
    return int((np.maximum.reduceat(ends, starts) - index["offset"][blocks.samples[starts]]).max())


def num_lanes(global_batch_size: int, world_size: int) -> int:
    """The fewest lanes, but 32 if possible, that share the global batch and are shared by the ranks evenly."""
    shares = [n for n in range(world_size, global_batch_size + 1, world_size) if global_batch_size % n == 0]
    return next((n for n in shares if n >= MIN_LANES), shares[-1])


class BlockOrder:
    """The order of an epoch, computed for the positions that are asked for; `len` is the number of positions.

    `lanes` divides the global batch; with `last` "drop", the end is left out. Its tables have a row for each run (a
    lane's part of a block) and each window (a lane's neighbouring runs, shuffled together), not for each sample.

    Places are counted along all lanes, one behind the other: lane `l` has those from `_lane_starts[l]`.
    """

    def __init__(self, blocks: Grid, global_batch_size: int, last: Last, lanes: int, seed: int, epoch: int) -> None:
        self._blocks, self._global_batch_size, self._seed, self._epoch = blocks, global_batch_size, seed, epoch
        self._share = global_batch_size // lanes  # of a global batch, that one lane gives
        lane_ends = np.cumsum(_lane_lengths(int(blocks.starts[-1]), global_batch_size, last, lanes))
        self._total = int(lane_ends[-1])
        self._lane_starts = np.append(0, lane_ends[:-1])

        sizes = np.diff(blocks.starts)
        shuffled = permutation(len(sizes), seed, epoch, BLOCKS)
        ends = np.cumsum(sizes[shuffled])
        run_ends = np.union1d(ends[ends < self._total], lane_ends)
        self._run_starts = np.append(0, run_ends[run_ends > 0])  # int64[runs + 1]
        starts = self._run_starts[:-1]
        block = np.searchsorted(ends, starts, "right")
        self._run_lanes = np.searchsorted(lane_ends, starts, "right")
        # From a place to the grid's: a block's samples lie there in the order of the file.
        self._shift = (blocks.starts[1:][shuffled] - ends)[block]
        window = block // -(-MIN_WINDOW // lanes)
        new = np.ones(len(starts), bool)
        new[1:] = (self._run_lanes[1:] != self._run_lanes[:-1]) | (window[1:] != window[:-1])
        self._windows = np.append(starts[new], self._total)  # int64[windows + 1]: the first place of each
        self._run_windows = np.cumsum(new) - 1
        self._shuffled: dict[int, np.ndarray] = {}  # the places of each window that was asked for last
        self._places = np.empty(0, np.int64)  # all of them, one window behind the other

    def __len__(self) -> int:
        return self._total

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples at `positions`, and the number of the run that each is read with: int64[N] both."""
        step, rest = np.divmod(positions, self._global_batch_size)
        lane, rest = np.divmod(rest, self._share)
        places = self._lane_starts[lane] + step * self._share + rest
        windows, number = np.unique(np.searchsorted(self._windows, places, "right") - 1, return_inverse=True)
        if windows.tolist() != [*self._shuffled]:
            known = self._shuffled
            self._shuffled = {w: known[w] if w in known else self._shuffle(w) for w in windows.tolist()}
            self._places = np.concatenate([*self._shuffled.values(), np.empty(0, np.int64)])
        first = np.cumsum([0, *map(len, self._shuffled.values())])[:-1]
        places = self._places[places - self._windows[windows][number] + first[number]]
        runs = np.searchsorted(self._run_starts, places, "right") - 1
        return self._blocks.samples[places + self._shift[runs]], runs

    def _shuffle(self, window: int) -> np.ndarray:
        places = np.arange(self._windows[window], self._windows[window + 1])
        return places[np.argsort(uniform(self._seed, self._epoch, WITHIN, places, 1)[:, 0], kind="stable")]

    def needs(self, rank: int, world_size: int, steps: range) -> Needs:
        """The runs that a rank reads in some steps of the epoch, in the order in which it needs them.

        When the steps begin within a window, or the rank has only part of a lane, some may turn out not to be needed.
        """
        batch_size = self._global_batch_size // world_size
        low, high = rank * batch_size // self._share, ((rank + 1) * batch_size - 1) // self._share
        lane_starts, windows = self._lane_starts[self._run_lanes], self._run_windows
        first = (self._windows[:-1][windows] - lane_starts) // self._share
        last = (self._windows[1:][windows] - 1 - lane_starts) // self._share
        mine = (low <= self._run_lanes) & (self._run_lanes <= high) & (last >= steps.start) & (first < steps.stop)
        runs = np.flatnonzero(mine)
        runs = runs[np.lexsort((self._run_lanes[runs], first[runs]))]
        return Needs(runs, first[runs], last[runs])

    def samples_of(self, run: int) -> np.ndarray:
        """The samples of a run, in the order of the file: int64[N]."""
        shift = self._shift[run]
        return self._blocks.samples[self._run_starts[run] + shift : self._run_starts[run + 1] + shift]


class Needs(NamedTuple):
    """Of each run, int64[runs] all."""

    runs: np.ndarray  # its number
    first: np.ndarray  # the step that may need it first
    last: np.ndarray  # the one that may need it last


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
