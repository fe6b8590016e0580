"""The order of an epoch, as pure functions of (seed, epoch, position).

Position `p` of an epoch names one sample, whatever the number of ranks, threads or the backend.
Global batch `s` is the positions [s·G, (s+1)·G), and each rank takes a contiguous slice of it. Random
numbers are hashes of counters, so that a position's numbers need no generator state and are the
same with every version of numpy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np

from ..errors import SettingError

GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_MASK = (1 << 64) - 1
MAX_SORTED = 1 << 24  # samples whose order is an array: ImageNet-21k has 14 million, and sorts them in 3 s
# Of the Feistel network. Four rounds cannot be distinguished from chance (Luby and Rackoff 1988); two more are margin.
ROUNDS = 6

# What random numbers are for; each purpose has a stream of its own.
SHUFFLE, AUGMENT, PACK, BLOCKS, WITHIN, BUFFER, FIRST_FLIP = range(1, 8)

Last = Literal["drop", "pad"]


def mix(counters: np.ndarray) -> np.ndarray:
    """Hash each number with the finaliser of SplitMix64: uint64 to uint64 of the same shape, one to one."""
    z = counters.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=64)
def stream(seed: int, epoch: int, purpose: int) -> np.uint64:
    """Return a start value for the random numbers of one purpose in one epoch, unlike every other's.

    Args:
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.
        purpose: Purpose of the numbers: SHUFFLE or another of the purposes above.
    """
    state = np.uint64(0)
    for part in (seed, epoch, purpose):
        state = mix(np.array([(int(state) + part * GOLDEN + GOLDEN) & _MASK], np.uint64))[0]
    return state


def uniform(seed: int, epoch: int, purpose: int, positions: np.ndarray, draws: int) -> np.ndarray:
    """Draw numbers for each position of an epoch.

    Args:
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.
        purpose: Purpose of the numbers, see `stream`.
        positions: Positions, int64[N], from 0.
        draws: Count of numbers per position.

    Returns:
        Numbers, float64[N, draws], uniform in [0, 1). A position's numbers do not depend on the other positions.
    """
    counters = positions.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashed = mix(counters * np.uint64(GOLDEN) + stream(seed, epoch, purpose))
    return (hashed >> np.uint64(11)) * 2.0**-53


def permutation(num_samples: int, seed: int, epoch: int, purpose: int = SHUFFLE) -> np.ndarray:
    """Shuffle the samples uniformly.

    Args:
        num_samples: Number of samples, at least 0.
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.
        purpose: Purpose of the shuffle, see `stream`.

    Returns:
        The sample at each position, int64[num_samples]. It may never change:

        >>> permutation(8, seed=0, epoch=0)
        array([4, 7, 2, 6, 1, 5, 0, 3])
    """
    with np.errstate(over="ignore"):
        counters = np.arange(num_samples, dtype=np.uint64) * np.uint64(GOLDEN) + stream(seed, epoch, purpose)
    return np.argsort(mix(counters), kind="stable")


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray | KeyedPermutation:
    """Return the order of an epoch: `order[positions]` are the samples there.

    Args:
        num_samples: Number of samples, at least 0.
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.

    Returns:
        An array for data sets of up to MAX_SORTED samples. Beyond that, sorting takes longer than a training
        should wait and more memory than a rank should need, so it is a KeyedPermutation, which is indexed alike.
    """
    if num_samples <= MAX_SORTED:
        return permutation(num_samples, seed, epoch)
    return KeyedPermutation(num_samples, seed, epoch)


class KeyedPermutation:
    """A permutation that is computed only at the positions asked for, so that it needs no memory.

    A number is written with two digits, in the bases `_low` and `_high`, whose product is slightly larger than
    `num_samples`. Round by round, a hash of one digit is added to the other (a generalised Feistel cipher). A result
    that is not below `num_samples` is encrypted again until it is (cycle walking). Both methods are those of Black
    and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, purpose: int = SHUFFLE) -> None:
        self._num_samples = num_samples
        low = math.isqrt(num_samples - 1) + 1 if num_samples else 1
        self._low, self._high = np.uint64(low), np.uint64(-(-num_samples // low))
        start = stream(seed, epoch, purpose)
        with np.errstate(over="ignore"):
            self._keys = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN) + start)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at `positions` (int64[N], each at least 0 and below the number of samples): int64[N]."""
        samples = self._network(positions.astype(np.uint64))
        while (outside := samples >= self._num_samples).any():
            samples[outside] = self._network(samples[outside])
        return samples.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        high, low = np.divmod(numbers, self._low)
        with np.errstate(over="ignore"):
            for key_high, key_low in self._keys.reshape(-1, 2):
                high = (high + mix(low * np.uint64(GOLDEN) + key_high) % self._high) % self._high
                low = (low + mix(high * np.uint64(GOLDEN) + key_low) % self._low) % self._low
        return high * self._low + low


def num_steps(num_samples: int, global_batch_size: int, last: Last) -> int:
    """Count the steps of an epoch, which are the same on every rank.

    Args:
        num_samples: Number of samples, at least 1.
        global_batch_size: Samples per step over all ranks.
        last: "drop" leaves out the positions that do not fill a global batch (other samples in every epoch), "pad"
            fills the last global batch with positions that name no sample.

    Raises:
        SettingError: An epoch would have no step.
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
    """Return the positions of one rank at one step.

    Args:
        step: Number of the step in the epoch, from 0.
        batch_size: Samples per rank.
        rank: Number of the rank, from 0.
        world_size: Number of ranks.

    Returns:
        Positions, int64[batch_size]. Those beyond the last sample are padding. The second of two ranks, in the first
        step:

        >>> slice_positions(step=0, batch_size=4, rank=1, world_size=2)
        array([4, 5, 6, 7])
    """
    first = (step * world_size + rank) * batch_size
    return np.arange(first, first + batch_size)
