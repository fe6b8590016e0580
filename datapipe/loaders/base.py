"""What every loader gives: batches, and a state of two integers.

Shapes: B samples of a batch, C channels, H and W pixels.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import torch

from ..dataset import DataSet
from ..dataset.manifest import INDEX
from ..errors import DatapipeError, SettingError
from ..names import ORDERS, Io
from ..sampling.augment import Augment, Windows, eval_windows, train_windows
from ..sampling.block_order import num_lanes
from ..sampling.order import KeyedPermutation, Last, epoch_order, num_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """One rank's slice of a global batch."""

    images: torch.Tensor  # uint8[B, C, H, W], channels last in memory
    labels: torch.Tensor  # int64[B]
    samples: torch.Tensor  # int64[B]: numbers in the data set, -1 for padding
    valid: torch.Tensor  # bool[B]: False for padding and for bad samples, whose images are black

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


@dataclass(frozen=True)
class LoaderOptions:
    """The settings of `open_loader`, checked."""

    batch_size: int
    train: bool
    size: int
    seed: int
    rank: int
    world_size: int
    order: str
    threads: int | None
    augment: Augment
    last: Last
    io: Io
    block_mib: int
    max_bad: int
    retries: int
    timeout_s: float

    def __post_init__(self) -> None:
        lowest = {
            "batch_size": 1, "size": 1, "seed": 0, "rank": 0, "world_size": 1, "threads": 1, "block_mib": 1,
            "max_bad": 0, "retries": 0,
        }  # fmt: skip
        for name, low in lowest.items():
            value = getattr(self, name)
            if name != "threads" or value is not None:
                object.__setattr__(self, name, _whole(name, value, low))  # numpy's integers become Python's
        if self.rank >= self.world_size:
            raise SettingError(f"rank: {self.rank} is out of range; allowed: 0 to {self.world_size - 1}")
        if self.order not in ORDERS:
            raise SettingError(f"order: {self.order!r} is not one of {', '.join(ORDERS)}")
        if not isinstance(self.timeout_s, Real) or isinstance(self.timeout_s, bool) or not self.timeout_s > 0:
            raise SettingError(f"timeout_s: {self.timeout_s!r} is out of range; allowed: seconds, above 0")
        if not isinstance(self.train, bool):
            raise SettingError(f"train: {self.train!r} is neither True nor False")
        if not isinstance(self.augment, Augment):
            raise SettingError(f"augment: {self.augment!r} is no Augment(…)")
        if self.last not in ("drop", "pad"):
            raise SettingError(f"last: {self.last!r} is not one of drop, pad")

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    def only_defaults(self, of: str, **defaults: object) -> None:
        """Refuse settings that have no meaning here."""
        for name, value in defaults.items():
            if getattr(self, name) != value:
                raise SettingError(f"{name}: {getattr(self, name)!r} has no meaning for {of}; leave it out")

    def num_threads(self) -> int:
        if self.threads is not None:
            return self.threads
        cores = len(os.sched_getaffinity(0))
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if not ranks.isdecimal() or int(ranks) < 1:
            raise SettingError(f"LOCAL_WORLD_SIZE: {ranks!r} is no number of ranks; allowed: 1 and more")
        return max(1, cores // int(ranks))


def _whole(name: str, value: object, low: int) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and value >= low:
        return int(value)
    raise SettingError(f"{name}: {value!r} is out of range; allowed: whole numbers from {low}")


class Split(NamedTuple):
    """What a loader must know of the data it reads. `None`: not known, or not the same for all images."""

    num_samples: int
    num_classes: int | None
    channels: int
    width: int | None  # pixels, of all images
    height: int | None
    smallest: tuple[int, int] | None  # width and height that no image falls short of
    checksum: str  # tells two data sets apart
    classes: tuple[str, ...] | None = None  # names, by label

    @classmethod
    def of(cls, data_set: DataSet) -> Split:
        manifest, index = data_set.manifest, data_set.index
        smallest = int(index["width"].min()), int(index["height"].min())
        (checksum,) = (file.xxh3_128 for file in manifest.files if file.name == INDEX)
        size = manifest.width, manifest.height
        classes = tuple(manifest.classes)
        return cls(len(data_set), manifest.num_classes, manifest.channels, *size, smallest, checksum, classes)


class Budget:
    """How many bad samples a loader may come across. Thread-safe."""

    def __init__(self, max_bad: int, rank: int) -> None:
        self._max_bad, self._rank = max_bad, rank
        self._bad: set[Hashable] = set()
        self._lock = threading.Lock()

    def spend(self, sample: Hashable, error: DatapipeError) -> None:
        """Count and name a bad sample, once. Raises the error when the budget is spent."""
        with self._lock:
            if sample in self._bad:
                return
            if len(self._bad) >= self._max_bad:
                raise error
            self._bad.add(sample)
            count = len(self._bad)
        logger.warning(
            "rank %d: bad sample, %d of max_bad=%d; its slot is black and not valid: %s",
            self._rank, count, self._max_bad, error,
        )  # fmt: skip


class Loader(ABC):
    """Iterable once per epoch. Backends only turn positions into images.

    Attributes: `options`, `num_samples` (of the whole data set), `num_classes` and `classes` (their names; None: not
    known), `channels` (1 or 3), `size` (pixels), `wait_s` (seconds that the consumer has waited for batches in all).
    """

    def __init__(self, split: Split, options: LoaderOptions) -> None:
        self.options = options
        self.num_samples, self.num_classes, self.channels = split.num_samples, split.num_classes, split.channels
        self.classes = split.classes
        self.size = options.size
        self._checksum = split.checksum
        self._augment = options.augment.resolve(split.width, split.height, options.size)
        if options.train and split.smallest is not None:
            self._augment.check(*split.smallest, options.size)
        self.wait_s = 0.0
        self._num_steps = num_steps(self.num_samples, options.global_batch_size, options.last)
        self.lanes = num_lanes(options.global_batch_size, options.world_size)
        self._epoch = self._step = 0
        self._closed = self._loaded = False
        self._current: Generator[Batch] | None = None

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch.

        Training goes on at the step where the state is; after the last one, with the next epoch. Evaluation begins at
        the beginning, unless a state was loaded. One iteration at a time: another that begins, or `set_epoch`, ends it.
        """
        self._check_open()
        if not self._loaded:
            if not self.options.train:
                self._step = 0
            elif self._step == self._num_steps:
                self._epoch, self._step = self._epoch + 1, 0
        self._loaded = False
        self._end_iteration()
        batches = self._current = self._batches(self._epoch, range(self._step, self._num_steps))
        try:
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(batches, None)
                except Exception:
                    self._check_open()  # another thread has closed it meanwhile: that is why
                    raise
                self.wait_s += time.perf_counter() - asked
                if batch is None:
                    return
                self._step += 1
                yield batch
                del batch  # so that its memory is free for the next one
                self._check_open()
                if self._current is not batches:
                    raise ValueError("this iteration was ended by another that began, or by set_epoch")
        finally:
            with suppress(ValueError):  # another thread closes it at this moment
                batches.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the loader is closed")

    def _end_iteration(self) -> None:
        if self._current is not None and not self._current.gi_running:
            self._current.close()
        self._current = None

    def stages(self) -> dict[str, float]:
        """Seconds in all of each stage that the backend knows of; `queue_empty`: of the consumer, waiting."""
        return {"queue_empty": self.wait_s}

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._end_iteration()
        self._epoch, self._step, self._loaded = operator.index(epoch), 0, False

    def state_dict(self) -> dict[str, int | str]:
        """Epoch and step, and what must be the same for them to mean the same."""
        lanes = {"lanes": self.lanes} if self.options.order == "blocks" else {}
        return {"epoch": self._epoch, "step": self._step, **lanes, **self.identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue at a state, saved on any number of ranks with the same global batch.

        Raises SettingError when seed, global batch or data set differ, or it is no state.
        """
        for name, mine in self.identity().items():
            if state.get(name) != mine:
                raise SettingError(f"{name}: the saved state is of {state.get(name)}, this loader has {mine}")
        epoch, step = (_whole(name, state.get(name), 0) for name in ("epoch", "step"))
        lanes = _whole("lanes", state.get("lanes"), 1) if self.options.order == "blocks" else self.lanes
        if step > self._num_steps:
            raise SettingError(f"step: the saved state is at {step}, an epoch has {self._num_steps}")
        if self.options.global_batch_size % lanes:
            raise SettingError(f"lanes: {lanes} do not share a global batch of {self.options.global_batch_size}")
        self._end_iteration()
        self._epoch, self._step, self.lanes, self._loaded = epoch, step, lanes, True

    def identity(self) -> dict[str, int | str]:
        """What must be the same for an epoch and a step to mean the same batches; `data_set` is a checksum."""
        options = self.options
        order = f"blocks of {options.block_mib} MiB" if options.order == "blocks" else options.order
        identity = {"seed": options.seed, "order": order, "global_batch_size": options.global_batch_size}
        return {**identity, "train": options.train, "last": options.last, "data_set": self._checksum}

    def close(self) -> None:
        """Stop all threads and release all files. May be called twice."""
        self._closed = True
        self._end_iteration()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    @abstractmethod
    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        """A generator of the batches at the given steps; closing it stops the work under way."""

    def _samples(self, epoch: int) -> np.ndarray | KeyedPermutation:
        """The order of an epoch: from positions, int64[N], to their samples."""
        if self.options.train:
            return epoch_order(self.num_samples, self.options.seed, epoch)
        return np.arange(self.num_samples)

    def _windows(self, epoch: int, positions: np.ndarray, widths: np.ndarray, heights: np.ndarray) -> Windows:
        """What to cut from images of these sizes (pixels) at these positions."""
        widths, heights = widths.astype(np.int64), heights.astype(np.int64)
        if not self.options.train:
            return eval_windows(widths, heights, self.size)
        return train_windows(self._augment, widths, heights, self.size, self.options.seed, epoch, positions)


def device_of(device: object) -> torch.device:
    """A CPU or a GPU that is here. Raises SettingError."""
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SettingError(f"device: {device!r} is none; allowed: cpu, cuda, cuda:0 …") from error
    gpus = torch.cuda.device_count()
    if found.type == "cpu" or (found.type == "cuda" and (found.index or 0) < gpus):
        return found
    raise SettingError(f"device: {device!r} is not here; allowed: cpu, and any of {gpus} cuda devices")


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def normalise(
    images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(images / 255 - mean) / std on the images' device: uint8[B, C, H, W] to `dtype`, same memory format.

    `mean` and `std`: one number a channel, of pixels in 0 to 1.
    """
    if len(mean) != images.shape[1] or len(std) != images.shape[1]:
        raise SettingError(f"mean, std: {len(mean)} and {len(std)} numbers for images of {images.shape[1]} channels")
    scale, shift = _affine(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(scale).add_(shift).to(dtype)


@functools.lru_cache  # on a GPU each of these is a copy that the host waits for
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)
