"""Loaders: one file for each backend, and one line in `datapipe/names.py`."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..checks import check_name
from ..dataset.manifest import MANIFEST, SPLITS
from ..errors import SettingError
from ..names import BACKENDS, Io
from ..sampling.augment import Augment
from ..sampling.order import Last
from ..split_names import TEST
from .base import Loader
from .batch import Batch
from .device import normalise
from .options import LoaderOptions

__all__ = ["Batch", "Loader", "LoaderOptions", "normalise", "open_loader"]


def open_loader(
    path: Path | str,
    batch_size: int,
    *,
    backend: str = "cpu",
    split: str | None = None,
    train: bool = LoaderOptions.train,
    size: int = LoaderOptions.size,
    seed: int = LoaderOptions.seed,
    rank: int = LoaderOptions.rank,
    world_size: int = LoaderOptions.world_size,
    order: str = LoaderOptions.order,
    threads: int | None = LoaderOptions.threads,
    cache: Path | str | None = None,
    device: torch.device | str | int | None = None,
    augment: Augment | None = None,
    last: Last | None = LoaderOptions.last,
    io: Io = LoaderOptions.io,
    block_mib: int = LoaderOptions.block_mib,
    max_bad: int = LoaderOptions.max_bad,
    retries: int = LoaderOptions.retries,
    timeout_s: float = LoaderOptions.timeout_s,
) -> Loader:
    """Open one packed data set (one split) for one rank.

    Iterate over the loader once per epoch. Training shuffles, crops and mirrors; evaluation goes in order and crops the
    centre. Settings have the same names and defaults in LoaderOptions, recipes and `datapipe bench`.

    Args:
        path: The data set's folder; with backend "webdataset" also a folder of tar shards, or URLs such as
            "pipe:ssh server cat shard-{000..146}.tar".
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

    Returns:
        A Loader, to be closed, or used in a `with`. Its batches hold uint8 images of `size` × `size` pixels.

    Raises:
        SettingError: For a setting out of its range.
        ManifestError: When there is no data set at `path`.
    """
    check_name("backend", backend, BACKENDS)
    options = LoaderOptions(
        batch_size=batch_size,
        train=train,
        size=size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        order=order,
        threads=threads,
        augment=Augment() if augment is None else augment,
        last=last,
        io=io,
        block_mib=block_mib,
        max_bad=max_bad,
        retries=retries,
        timeout_s=timeout_s,
    )
    if split not in (None, *SPLITS, TEST):
        raise SettingError(f"split: {split!r} is not one of {', '.join((*SPLITS, TEST))}")
    own: dict[str, Any] = {}  # settings of this backend alone
    if split is not None and os.path.isdir(Path(path) / split):
        path = Path(path) / split
    elif split is not None and backend == "webdataset":
        own["split"] = split
    elif split is not None:
        raise SettingError(f"split: {split!r} is not in {path}")
    with ExitStack() as holds:
        if cache is not None:
            if backend == "webdataset" and not os.path.exists(Path(path) / MANIFEST):
                raise SettingError(f"cache: {path} cannot be staged; allowed: with a packed data set")
            from ..staging import StageOptions
            from ..staging.copy import open_cache

            staging = StageOptions(timeout_s=options.timeout_s)
            folder, is_whole = open_cache(Path(path), Path(cache), staging, holds, accepts_part=backend != "webdataset")
            path = folder if is_whole else path
            own |= {} if is_whole else {"local": folder}
        make_loader = importlib.import_module(f".{backend}", __name__).make_loader
        loader: Loader = make_loader(path, options, device, **own)
        loader.holds = holds.pop_all()
    return loader
