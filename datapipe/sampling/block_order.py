"""The order "blocks": large contiguous reads, each byte once, for filesystems that are slow at anything else.

A block is the samples of a shard that begin in the same cell of a grid of, say, 8 MiB. The blocks of an epoch are
shuffled, laid end to end, and divided into `lanes` of equal length. Global batch `s` takes the next samples of each
lane, in the order of the lanes. Within a lane, the samples of a few neighbouring blocks (a window) are shuffled. So a
rank whose slice of the batch is made of whole lanes reads the blocks of its lanes and no others. The number of lanes
is part of the order and of a loader's state: with another number of ranks the same global batches follow.

Pure functions, without I/O.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .order import BLOCKS, WITHIN, Last, num_steps, permutation, uniform

MIN_LANES = 32  # as many different blocks in each global batch, where its size allows
MIN_WINDOW = 32  # blocks shuffled together, over all lanes
NEVER = np.int64(1 << 62)  # later than any turn


class Grid(NamedTuple):
    """The blocks of a data set: block `b` holds samples[starts[b] : starts[b + 1]], in the order of the file."""

    samples: np.ndarray  # int64[num_samples]
    starts: np.ndarray  # int64[num_blocks + 1]


def grid(index: np.ndarray, block_bytes: int) -> Grid:
    """Divide the samples of an index (RECORD[num_samples]) into blocks of about `block_bytes` bytes."""
    shards, offsets = index["shard"], index["offset"]
    same = shards[1:] == shards[:-1]
    if ((shards[1:] > shards[:-1]) | (same & (offsets[1:] >= offsets[:-1]))).all():
        samples = np.arange(len(index))  # in this order `pack` writes them: no need to sort
    else:
        samples = np.lexsort((offsets, shards))
        shards, offsets = shards[samples], offsets[samples]
        same = shards[1:] == shards[:-1]
    cells = offsets // np.uint64(block_bytes)
    first = np.flatnonzero(~same | (cells[1:] != cells[:-1])) + 1
    return Grid(samples, np.concatenate([[0], first, [len(samples)]]))


def longest(index: np.ndarray, blocks: Grid) -> int:
    """Return the bytes of the longest block, from its first sample's first byte to its last sample's last byte."""
    ends = (index["offset"] + index["size"])[blocks.samples]
    starts = blocks.starts[:-1]
    return int((np.maximum.reduceat(ends, starts) - index["offset"][blocks.samples[starts]]).max())


def num_lanes(global_batch_size: int, world_size: int) -> int:
    """Choose the number of lanes: the fewest from 32 on, or the most below.

    It divides the global batch, and each rank gets the same number of lanes:

        >>> num_lanes(global_batch_size=256, world_size=8), num_lanes(global_batch_size=24, world_size=4)
        (32, 24)
    """
    shares = [n for n in range(world_size, global_batch_size + 1, world_size) if global_batch_size % n == 0]
    return next((n for n in shares if n >= MIN_LANES), shares[-1])


class BlockOrder:
    """The order of an epoch, computed only at the positions asked for; `len` is the number of positions.

    Its tables have a row for each run (a lane's part of a block, which is read at once) and each window (neighbouring
    runs of a lane, shuffled together), not for each sample. A *place* counts the samples of all lanes, laid end to
    end: lane `l` begins at place `_lane_starts[l]`.

    Three blocks of four samples, two lanes: each batch of four has two samples of each lane. The second block is
    divided between the lanes, so it is read in two runs.

        >>> blocks = Grid(samples=np.arange(12), starts=np.array([0, 4, 8, 12]))
        >>> order = BlockOrder(blocks, global_batch_size=4, last="drop", lanes=2, seed=0, epoch=0)
        >>> samples, runs = order.at(np.arange(12))
        >>> samples.reshape(3, 4)
        array([[ 0,  9,  2,  7],
               [10, 11,  5,  6],
               [ 8,  1,  3,  4]])
        >>> runs.reshape(3, 4)
        array([[1, 0, 2, 3],
               [0, 0, 3, 3],
               [0, 1, 2, 3]])

    Args:
        blocks: Blocks of the data set.
        global_batch_size: Samples per step over all ranks.
        last: "drop" leaves out what does not fill a global batch, "pad" keeps it.
        lanes: Number of lanes, which divides `global_batch_size`, see `num_lanes`.
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.
    """

    def __init__(self, blocks: Grid, global_batch_size: int, last: Last, lanes: int, seed: int, epoch: int) -> None:
        self._blocks, self._global_batch_size, self._seed, self._epoch = blocks, global_batch_size, seed, epoch
        self._share = global_batch_size // lanes  # samples that each lane gives to a global batch
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
        self._run_blocks = shuffled[block]
        # What to add to a place to get an index into `blocks.samples`, where samples are in the order of the file.
        self._shift = (blocks.starts[1:][shuffled] - ends)[block]
        window = block // -(-MIN_WINDOW // lanes)
        new = np.ones(len(starts), bool)
        new[1:] = (self._run_lanes[1:] != self._run_lanes[:-1]) | (window[1:] != window[:-1])
        self._windows = np.append(starts[new], self._total)  # int64[windows + 1], the first place of each
        self._run_windows = np.cumsum(new) - 1
        self._shuffled: dict[int, np.ndarray] = {}  # the windows of the latest call of `at`: their places
        self._places = np.empty(0, np.int64)  # the same, end to end

    def __len__(self) -> int:
        return self._total

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples at `positions` (int64[N]), and the number of the run each is read with: int64[N] both."""
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
        """List the runs that a rank reads in some steps of the epoch, in the order in which it needs them.

        When the steps begin within a window, or the rank has only part of a lane, some may turn out not to be needed.

        Args:
            rank: Number of the rank, from 0.
            world_size: Number of ranks, which divides the global batch.
            steps: Steps of the epoch.
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

    def turns(self, ranks: range, world_size: int) -> np.ndarray:
        """Return the place of each block in the sequence in which some ranks read them: int64[num_blocks].

        Blocks that these ranks do not read have NEVER; of one that is read in parts, the last part counts.

        Args:
            ranks: Ranks of a node.
            world_size: Number of ranks, which divides the global batch.
        """
        turns = np.full(len(self._blocks.starts) - 1, -1)
        for rank in ranks:
            needs = self.needs(rank, world_size, range(self._total))
            keys = needs.first * len(self._lane_starts) + self._run_lanes[needs.runs]
            np.maximum.at(turns, self._run_blocks[needs.runs], keys)
        order = np.argsort(turns, kind="stable")
        num_unread = np.count_nonzero(turns < 0)
        turns[order[:num_unread]], turns[order[num_unread:]] = NEVER, np.arange(len(turns) - num_unread)
        return turns

    def block_of(self, run: int) -> tuple[int, np.ndarray]:
        """Return the block that a run is a part of, or all of, and its samples in the order of the file: int64[N]."""
        block = int(self._run_blocks[run])
        return block, self._blocks.samples[self._blocks.starts[block] : self._blocks.starts[block + 1]]

    def samples_of(self, run: int) -> np.ndarray:
        """Return the samples of a run, in the order of the file: int64[N]."""
        shift = self._shift[run]
        return self._blocks.samples[self._run_starts[run] + shift : self._run_starts[run + 1] + shift]

    def steps_of(self, run: int) -> np.ndarray:
        """Return the step that needs each sample of a run, in the order of the file: int64[N]."""
        window, start, stop = self._run_windows[run], *self._run_starts[run : run + 2]
        places = self._shuffle(window)
        turns = np.flatnonzero((start <= places) & (places < stop))
        steps = np.empty(stop - start, np.int64)
        steps[places[turns] - start] = turns + self._windows[window] - self._lane_starts[self._run_lanes[run]]
        return steps // self._share


class Needs(NamedTuple):
    """The runs that a rank needs: int64[runs] each."""

    runs: np.ndarray  # their numbers
    first: np.ndarray  # the first step that may need a run
    last: np.ndarray  # the last step that may


def _lane_lengths(num_samples: int, global_batch_size: int, last: Last, lanes: int) -> np.ndarray:
    """Return the samples of each lane: int64[lanes]. A last batch that is not full has its first positions filled."""
    steps, share = num_steps(num_samples, global_batch_size, last), global_batch_size // lanes
    in_last = min(num_samples - (steps - 1) * global_batch_size, global_batch_size)
    return (steps - 1) * share + np.clip(in_last - np.arange(lanes) * share, 0, share)


def shuffle_quality(samples: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Measure how far an order is from that of the files.

    Args:
        samples: Sample at each position, int64[N].
        labels: Label at each position, int64[N].

    Returns:
        `displacement`: the mean distance of a sample from its place in the files, divided by that of a uniform
        permutation (N / 3); 1 is uniform, 0 is unshuffled. `label_runs`: the number of sequences of equal labels,
        divided by what uniform draws without replacement give on average (Wald and Wolfowitz 1940); 1 is uniform,
        less is clustered. `neighbours`: the share of neighbouring positions whose samples are neighbours in the
        files; uniform is 2 / N.
    """
    total = len(samples)
    displacement = np.abs(samples - np.arange(total)).mean() / (total / 3)
    counts = np.unique(labels, return_counts=True)[1].astype(float)
    expected = 1 + (total**2 - (counts**2).sum()) / total
    runs = 1 + np.count_nonzero(labels[1:] != labels[:-1])
    neighbours = np.mean(np.abs(np.diff(samples)) == 1) if total > 1 else 0.0
    return {"displacement": float(displacement), "label_runs": float(runs / expected), "neighbours": float(neighbours)}
