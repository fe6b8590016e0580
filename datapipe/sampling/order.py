"""The order of an epoch, as pure functions of (seed, epoch, position).

Position `p` of an epoch names one sample, whatever the number of ranks, threads or the backend.
Global batch `s` is the positions [s·G, (s+1)·G), of which rank `r` takes its contiguous slice. Random
numbers are hashes of counters, so that a position's numbers need no generator state, and stay the
same under every numpy.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ..errors import SettingError

GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_MASK = (1 << 64) - 1
MAX_SORTED = 1 << 24  # samples whose order is an array: ImageNet-21k has 14 million, and sorts them in 3 s
ROUNDS = 6  # of the Feistel network: four give what cannot be told from chance (Luby and Rackoff 1988), and two more

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


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray | KeyedPermutation:
    """The order of an epoch: `order[positions]` are the samples there, int64 as `positions`; `len(order)` of them.

    An array for data sets of up to MAX_SORTED samples; beyond, sorting takes longer than a training should wait, and
    more memory than a rank should need.
    """
    if num_samples <= MAX_SORTED:
        return permutation(num_samples, seed, epoch)
    return KeyedPermutation(num_samples, seed, epoch)


class KeyedPermutation:
    """A permutation that is computed for the positions that are asked for: no array, whatever the number of samples.

    A number is written with two digits, to the bases `_low` and `_high`, whose product is hardly larger than
    `num_samples`; in turns a hash of each digit is added to the other (the generalised Feistel cipher). What comes out
    beyond the samples goes through once more, until it is inside (cycle walking). Both are methods of Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
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
        """The samples at `positions`, int64[N], each from 0 to below the number of samples."""
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
