"""What every loader gives: batches, and a state of two integers.

Shapes: B samples per batch, C channels, H and W pixels.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, TypedDict

import numpy as np

from ..checks import checked_int
from ..dataset import DataSet
from ..dataset.manifest import Manifest
from ..errors import SettingError
from ..sampling.augment import Crops, eval_crops, train_crops
from ..sampling.block_order import num_lanes
from ..sampling.order import KeyedPermutation, epoch_order, num_steps, slice_positions
from .batch import NOT_PICKLED, Batch, TupleLoader
from .options import LoaderOptions

Order = np.ndarray | KeyedPermutation  # the sample at each position of an epoch


class Place(TypedDict, total=False):
    """Where an error is: what DatapipeError takes beside its message."""

    path: Path | str
    shard: str
    key: str


class DataDescription(NamedTuple):
    """A data set as a loader must know it. `None`: not known, or not the same for all images."""

    num_samples: int
    num_classes: int | None
    channels: int
    width: int | None  # pixels, of all images
    height: int | None
    smallest: tuple[int, int] | None  # a width and a height: no image is narrower, or lower
    checksum: str  # tells two data sets apart
    classes: tuple[str, ...] | None = None  # names, by label

    @classmethod
    def from_data_set(cls, data_set: DataSet) -> DataDescription:
        """Describe a packed data set."""
        index = data_set.index
        smallest = int(index["width"].min()), int(index["height"].min())
        return cls.from_manifest(data_set.manifest, smallest, data_set.manifest.index_checksum)

    @classmethod
    def from_manifest(cls, manifest: Manifest, smallest: tuple[int, int] | None, checksum: str) -> DataDescription:
        """Return the description of a packed data set.

        Args:
            manifest: Manifest of the data set.
            smallest: A width and a height, see above.
            checksum: Checksum that tells it from other data sets.
        """
        width, height, classes = manifest.width, manifest.height, tuple(manifest.classes)
        num_classes, channels = manifest.num_classes, manifest.channels
        return cls(manifest.num_samples, num_classes, channels, width, height, smallest, checksum, classes)


class Loader(ABC):
    """An iterable over a rank's batches, once per epoch. Backends only turn positions into images.

    Attributes:
        options: The settings that it was opened with.
        num_samples: Number of samples of the whole data set.
        num_classes: Number of classes; None if it is not known.
        classes: Names of the classes, by label; None if they are not known.
        channels: Channels of the images, 1 or 3.
        size: Width and height of the images in pixels.
        lanes: Number of lanes of the order "blocks", see datapipe/sampling/block_order.py.
        wait_s: Seconds that the consumer has waited for batches, in all.
        holds: Resources that are let go when the loader is closed: the copy in a cache, which no process removes until
            then.
    """

    def __init__(self, data: DataDescription, options: LoaderOptions) -> None:
        self.options = options
        self.num_samples, self.num_classes, self.channels = data.num_samples, data.num_classes, data.channels
        self.classes = data.classes
        self.size = options.size
        self._checksum = data.checksum
        self._augment = options.augment_for(data.width, data.height)
        if options.train and data.smallest is not None:
            self._augment.check(*data.smallest, options.size)
        self.wait_s = 0.0
        self.holds = ExitStack()
        self._num_steps = num_steps(self.num_samples, options.global_batch_size, options.last_batch)
        self.lanes = num_lanes(options.global_batch_size, options.world_size)
        self._epoch = self._step = 0
        self._closed = self._loaded = False
        self._current: Generator[Batch] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of an epoch.

        Training continues at the step where the state is; after the last one, with the next epoch. Evaluation begins
        at the beginning, unless a state was loaded. One iteration at a time: another that begins, or `set_epoch`, ends
        it.
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
                began = time.perf_counter()
                try:
                    batch = next(batches, None)
                except Exception:
                    self._check_open()  # another thread has closed it meanwhile: that is why
                    raise
                self.wait_s += time.perf_counter() - began
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
        current, self._current = self._current, None
        # Another thread may be inside: it ends the generator itself.
        if current is not None and inspect.getgeneratorstate(current) != inspect.GEN_RUNNING:
            current.close()

    @property
    def is_at_end(self) -> bool:
        """Whether the epoch's last batch has been given."""
        return self._step == self._num_steps

    def stages(self) -> dict[str, float]:
        """Return the seconds, in all, of each stage that the backend measures, by name.

        "queue_empty" are the consumer's, waiting for batches.
        """
        return {"queue_empty": self.wait_s}

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, a whole number from 0. Raises SettingError for another."""
        epoch = checked_int("epoch", epoch, 0)
        self._end_iteration()
        self._epoch, self._step, self._loaded = epoch, 0, False

    def set_size(self, size: int) -> None:
        """Give images another size from now on; ends an iteration that is under way.

        Args:
            size: Width and height in pixels, from 1.

        Raises:
            SettingError: It is out of range; or the crop is "pad", which scales no image.
        """
        size = checked_int("size", size, 1)
        if size == self.size:
            return
        if self.options.train and self._augment.crop == "pad":
            raise SettingError(f'size: {size} is not {self.size}, and the crop "pad" scales no image')
        self._check_open()
        self._end_iteration()
        self._take_size(size)

    def state_dict(self) -> dict[str, int | str]:
        """Return epoch and step, and what must be the same for them to mean the same."""
        lanes: dict[str, int | str] = {"lanes": self.lanes} if self.options.order == "blocks" else {}
        return {"epoch": self._epoch, "step": self._step, **lanes, **self.identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue at a state, saved on any number of ranks with the same global batch.

        Raises SettingError when seed, global batch or data set differ, or when it is not a state.
        """
        for name, mine in self.identity().items():
            if state.get(name) != mine:
                raise SettingError(f"{name}: the saved state is of {state.get(name)}, this loader has {mine}")
        epoch, step = (checked_int(name, state.get(name), 0) for name in ("epoch", "step"))
        lanes = checked_int("lanes", state.get("lanes"), 1) if self.options.order == "blocks" else self.lanes
        if step > self._num_steps:
            raise SettingError(f"step: the saved state is at {step}, an epoch has {self._num_steps}")
        if self.options.global_batch_size % lanes:
            raise SettingError(f"lanes: {lanes} do not share a global batch of {self.options.global_batch_size}")
        self._end_iteration()
        self._epoch, self._step, self.lanes, self._loaded = epoch, step, lanes, True

    def identity(self) -> dict[str, int | str]:
        """Return what must be the same for an epoch and a step to mean the same batches; `data_set` is a checksum."""
        options = self.options
        return {
            "seed": options.seed,
            "order": f"blocks of {options.block_mib} MiB" if options.order == "blocks" else options.order,
            "global_batch_size": options.global_batch_size,
            "train": options.train,
            "last": options.last_batch,
            "data_set": self._checksum,
        }

    def close(self) -> None:
        """Stop all threads and release all files. May be called twice."""
        self._closed = True
        self._end_iteration()
        self.holds.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    # --- what loops that are written for torch.utils.data.DataLoader ask for ---

    @property
    def batch_size(self) -> int:
        """Samples per batch of this rank."""
        return self.options.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a global batch are left out."""
        return self.options.last_batch == "drop"

    @property
    def dataset(self) -> Sequence[int]:
        """The numbers of the samples, of all ranks, so that `len(loader.dataset)` is `num_samples`."""
        return range(self.num_samples)

    def as_tuples(self) -> TupleLoader:
        """Return an iterable over the same batches as (images, labels), without slots that are not `valid`."""
        return TupleLoader(self)

    @abstractmethod
    def _batches(self, epoch: int, steps: range) -> Generator[Batch]:
        """Iterate over the batches at the given steps; closing the generator stops the work under way."""

    def _take_size(self, size: int) -> None:
        """Give images another size; nothing is under way. A backend also replaces what depends on it."""
        self.size = size

    def positions(self, step: int) -> np.ndarray:
        """Return the positions of this rank's slice of a global batch, int64[batch_size]."""
        return slice_positions(step, self.options.batch_size, self.options.rank, self.options.world_size)

    def full_order(self, epoch: int) -> Order:
        """Return the sample at each position of an epoch: shuffled in training, else one behind the other."""
        if not self.options.train:
            return np.arange(self.num_samples)
        return epoch_order(self.num_samples, self.options.seed, epoch)

    def crops(
        self, epoch: int, positions: np.ndarray, samples: np.ndarray, widths: np.ndarray, heights: np.ndarray
    ) -> Crops:
        """Choose what is cut out of samples; training draws it.

        Args:
            epoch: Number of the epoch, from 0.
            positions: Positions of the samples in the epoch, int64[N].
            samples: Numbers of the samples, int64[N].
            widths: Widths of the images, int[N], in pixels.
            heights: Heights of the images, int[N], in pixels.

        Returns:
            A box and a flip for each.
        """
        widths, heights = widths.astype(np.int64), heights.astype(np.int64)
        if not self.options.train:
            return eval_crops(widths, heights, self.size)
        return train_crops(self._augment, widths, heights, self.size, self.options.seed, epoch, positions, samples)
