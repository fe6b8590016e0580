"""The order of an epoch, as pure functions of (seed, epoch, position).

Position `p` of an epoch names one sample, whatever the number of ranks, threads or the backend.
Global batch `s` is the positions [s·G, (s+1)·G), of which rank `r` takes its contiguous slice. Random
numbers are hashes of counters, so that a position's numbers need no generator state, and stay the
same under every numpy.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .errors import SettingError

GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_MASK = (1 << 64) - 1

SHUFFLE, AUGMENT, PACK, BLOCKS, WITHIN, BUFFER = range(1, 7)  # what random numbers are for: a stream each

Last = Literal["drop", "pad"]


def mix(counters: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: uint64 in, uint64 of the same shape out, one to one."""
    z = counters.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(seed: int, epoch: int, purpose: int) -> np.uint64:
    """A start value for one purpose in one epoch, unlike every other's."""
    state = np.uint64(0)
    for part in (seed, epoch, purpose):
        state = mix(np.array([(int(state) + part * GOLDEN + GOLDEN) & _MASK], np.uint64))[0]
    return state


def uniform(seed: int, epoch: int, purpose: int, positions: np.ndarray, draws: int) -> np.ndarray:
    """float64[len(positions), draws], uniform in [0, 1)."""
    counters = positions.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashed = mix(counters * np.uint64(GOLDEN) + stream(seed, epoch, purpose))
    return (hashed >> np.uint64(11)) * 2.0**-53


def permutation(num_samples: int, seed: int, epoch: int, purpose: int = SHUFFLE) -> np.ndarray:
    """A uniform permutation: int64[num_samples], the sample at each position."""
    with np.errstate(over="ignore"):
        counters = np.arange(num_samples, dtype=np.uint64) * np.uint64(GOLDEN) + stream(seed, epoch, purpose)
    return np.argsort(mix(counters), kind="stable")


def num_steps(num_samples: int, global_batch_size: int, last: Last) -> int:
    """Steps of an epoch, the same on every rank.

    `drop` leaves out the positions that do not fill a global batch (other samples in every epoch);
    `pad` fills the last global batch with positions that name no sample. Raises SettingError when an
    epoch would have no step.
    """
    if last == "pad":
        return -(-num_samples // global_batch_size)
    if global_batch_size > num_samples:
        raise SettingError(
            f"batch_size: the global batch of {global_batch_size} is larger than the data set of {num_samples}"
            " samples, so an epoch would have no step; allowed: at most the number of samples"
        )
    return num_samples // global_batch_size


def slice_positions(step: int, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """int64[batch_size]: the positions of one rank at one step. Those beyond the last sample are padding."""
    first = (step * world_size + rank) * batch_size
    return np.arange(first, first + batch_size)
