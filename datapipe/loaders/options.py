"""The settings of a loader, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import get_args

from ..checks import check_bool, check_name, check_seconds, checked_int
from ..errors import SettingError
from ..names import IOS, ORDERS, Io
from ..sampling.augment import Augment
from ..sampling.order import Last
from ..watched import TIMEOUT_S

# The lowest value of each setting that is a whole number.
LOWEST = {
    "batch_size": 1,
    "size": 1,
    "seed": 0,
    "rank": 0,
    "world_size": 1,
    "threads": 1,
    "block_mib": 1,
    "max_bad": 0,
    "retries": 0,
}


@dataclass(frozen=True)
class LoaderOptions:
    """The settings of `open_loader`, which describes them: the same names, and the same defaults.

    Raises SettingError for a setting out of its range.
    """

    batch_size: int
    train: bool = True
    size: int = 224
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    order: str = "full"
    threads: int | None = None
    augment: Augment = field(default_factory=Augment)
    last: Last | None = None
    io: Io = "cached"
    block_mib: int = 8
    max_bad: int = 0
    retries: int = 9
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        for name, lowest in LOWEST.items():
            value = getattr(self, name)
            if name != "threads" or value is not None:
                object.__setattr__(self, name, checked_int(name, value, lowest))  # numpy's integers become Python's
        if self.rank >= self.world_size:
            raise SettingError(f"rank: {self.rank} is out of range; allowed: 0 to {self.world_size - 1}")
        check_name("order", self.order, ORDERS)
        check_name("io", self.io, IOS)
        check_seconds("timeout_s", self.timeout_s)
        check_bool("train", self.train)
        if not isinstance(self.augment, Augment):
            raise SettingError(f"augment: {self.augment!r} is not an Augment(…)")
        if self.last is not None:
            check_name("last", self.last, get_args(Last))

    @property
    def last_batch(self) -> Last:
        """What becomes of samples that do not fill a global batch: `last`, or else "drop" in training, and "pad"."""
        return self.last or ("drop" if self.train else "pad")

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    def refuse_other_than(self, subject: str, **allowed: object) -> None:
        """Raise SettingError for a setting that has no meaning for `subject` and is not at its only value."""
        for name, value in allowed.items():
            if getattr(self, name) != value:
                raise SettingError(f"{name}: {getattr(self, name)!r} has no meaning for {subject}; leave it out")

    def ranks_of_node(self) -> range:
        """Return the ranks on this node: LOCAL_WORLD_SIZE neighbours, as torchrun starts them."""
        count = _local_world_size()
        first = self.rank // count * count
        return range(first, min(first + count, self.world_size))

    def num_threads(self) -> int:
        """Return `threads`, or else this rank's share of the cores that the process may use."""
        if self.threads is not None:
            return self.threads
        cores = len(os.sched_getaffinity(0))
        return max(1, cores // _local_world_size())


def _local_world_size() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise SettingError(f"LOCAL_WORLD_SIZE: {ranks!r} is not a number of ranks; allowed: 1 and more")
    return int(ranks)
