"""The settings of a loader, described and checked once, and a function that takes each as an argument."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, get_args

import torch

from ..checks import check_bool, check_name, check_seconds, checked_int
from ..dataset.manifest import SPLITS
from ..errors import SettingError
from ..names import BACKENDS, IOS, ORDERS, Io
from ..sampling.augment import Augment
from ..sampling.order import Last
from ..split_names import TEST
from ..watched import TIMEOUT_S
from .device import resolve_device

# The lowest value of each setting that is a whole number.
_LOWEST = {
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

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class LoaderOptions:
    """The settings of `open_loader`. Raises SettingError for a setting out of its range.

    Args:
        batch_size: Samples per batch of this rank, from 1.
        backend: "cpu"; "dali", NVIDIA's DALI, which decodes on `device`; "webdataset", which streams tar shards
            (see datapipe/loaders/webdataset.py), has neither `order` nor `io`, and tries no read again; or "resident",
            which keeps small images of one size on `device`, decoded, and has neither `order` nor `io`.
        split: "train", "val" or "test", in a folder that has several: packed data sets, or tar shards whose names say
            it (see datapipe/splits.py). None: the folder has one.
        train: Whether to train, or to evaluate.
        size: Width and height of the images in pixels, from 1.
        seed: Seed of the order, the crops and the flips, from 0.
        rank: This process's number, from 0 to `world_size` - 1.
        world_size: The number of ranks, which share each global batch of `batch_size` · `world_size` samples.
        order: "full", a uniform permutation of all samples, or "blocks", which reads `block_mib` MiB at a time and
            each byte once per epoch (see datapipe/sampling/block_order.py): for data that are not on a local disk.
        threads: Threads that decode (default: the cores that this process may use, over torchrun's LOCAL_WORLD_SIZE).
        cache: A node-local folder to which the data set is staged first, once per node. Until the loader is closed,
            nobody removes that copy to make room for another. While `datapipe stage` is at work there in the
            background, what has landed is read there, and the rest from `path`.
        device: Device to which batches are delivered (default: the CPU).
        augment: Settings of cropping and mirroring in training; see Augment, whose defaults are the default.
        last: Treatment of samples that do not fill a global batch: "drop" leaves them out, "pad" fills it with black
            images that are not `valid` (default: "drop" in training, "pad" in evaluation).
        io: "cached", "mmap" or "direct" (see datapipe/dataset/shard_reader.py).
        block_mib: Size of a block of order "blocks" in MiB, from 1.
        max_bad: The number of bad samples (damaged, or not a readable image) that each rank tolerates, from 0. Each is
            logged, and replaced by a black image that is not `valid`; the next one is an error.
        retries: Number of times that an open or a read that fails is tried again, from 0, with pauses of 0.1 s, 0.2 s,
            0.4 s and so on: 51 s in all for 9, as long as a file server takes to be replaced.
        timeout_s: Seconds, above 0, after which it is an error that a batch, opening the data set, or a read or write
            of staging it has not come. Every 10 s it is logged which read does not answer, or is being tried again.
    """

    batch_size: int
    _: KW_ONLY
    backend: str = "cpu"
    split: str | None = None
    train: bool = True
    size: int = 224
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    order: str = "full"
    threads: int | None = None
    cache: Path | str | None = None
    device: torch.device | str | int | None = None
    augment: Augment | None = None
    last: Last | None = None
    io: Io = "cached"
    block_mib: int = 8
    max_bad: int = 0
    retries: int = 9
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        check_name("backend", self.backend, BACKENDS)
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if name != "threads" or value is not None:
                object.__setattr__(self, name, checked_int(name, value, lowest))  # numpy's integers become Python's
        if self.rank >= self.world_size:
            raise SettingError(f"rank: {self.rank} is out of range; allowed: 0 to {self.world_size - 1}")
        if self.split not in (None, *SPLITS, TEST):
            raise SettingError(f"split: {self.split!r} is not one of {', '.join((*SPLITS, TEST))}")
        check_name("order", self.order, ORDERS)
        check_name("io", self.io, IOS)
        check_seconds("timeout_s", self.timeout_s)
        check_bool("train", self.train)
        for name, kind in (("cache", str | os.PathLike), ("augment", Augment)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise SettingError(f"{name}: {value!r} is not {'a folder' if name == 'cache' else 'an Augment(…)'}")
        if self.last is not None:
            check_name("last", self.last, get_args(Last))
        resolve_device(self.device)  # refuses what is not here

    @property
    def last_batch(self) -> Last:
        """What becomes of samples that do not fill a global batch: `last`, or else "drop" in training, and "pad"."""
        return self.last or ("drop" if self.train else "pad")

    def augment_for(self, width: int | None, height: int | None) -> Augment:
        """Return `augment` for images of a width and a height, in pixels; None: they differ."""
        return (self.augment or Augment()).resolve(width, height, self.size)

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


def takes_settings(
    kind: Callable[_P, LoaderOptions],
) -> Callable[[Callable[[Path | str, LoaderOptions], _R]], Callable[Concatenate[Path | str, _P], _R]]:
    """Return a decorator that makes each field of LoaderOptions an argument of a function, and describes it there.

    The function has two parameters, `path` and `options`; when it is called, it has `path` and those of `kind`, which
    is LoaderOptions, for type checkers and for `help` alike.
    """

    def decorate(function: Callable[[Path | str, LoaderOptions], _R]) -> Callable[Concatenate[Path | str, _P], _R]:
        @functools.wraps(function)
        def call(path: Path | str, *args: _P.args, **settings: _P.kwargs) -> _R:
            try:
                options = kind(*args, **settings)
            except TypeError as error:  # of an unknown name, or without a batch size
                raise TypeError(str(error).replace("LoaderOptions.__init__", function.__name__)) from None
            return function(path, options)

        signature, options = (inspect.signature(taker, eval_str=True) for taker in (function, kind))
        parameters = [signature.parameters["path"], *options.parameters.values()]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__annotations__["return"] = signature.return_annotation
        settings = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
        call.__doc__ = re.sub(r"(?m)^    options: .*$", lambda _: settings, inspect.getdoc(function) or "")
        return call

    return decorate
