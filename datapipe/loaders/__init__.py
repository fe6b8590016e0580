"""Loaders: one file for each backend, and one line in `datapipe/names.py`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from ..dataset.manifest import MANIFEST
from ..errors import SettingError
from ..names import BACKENDS, Io
from ..sampling.augment import Augment
from ..sampling.order import Last
from .base import Batch, Loader, LoaderOptions, normalise

__all__ = ["Batch", "Loader", "LoaderOptions", "normalise", "open_loader"]


def open_loader(
    path: Path | str,
    batch_size: int,
    *,
    backend: str = "cpu",
    train: bool = True,
    size: int = 224,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    order: str = "full",
    threads: int | None = None,
    cache: Path | str | None = None,
    device: object = None,
    augment: Augment | None = None,
    last: Last | None = None,
    io: Io = "cached",
    block_mib: int = 8,
    max_bad: int = 0,
    retries: int = 9,
    timeout_s: float = 300.0,
) -> Loader:
    """Open one packed data set (one split) for one rank.

    Iterate over it once per epoch; each batch has `batch_size` samples of this rank, as uint8 images
    of `size` × `size` pixels. `train` shuffles, cuts and mirrors (as `augment` says; default: see
    Augment) and leaves out what does not fill a global batch; evaluation goes in order, cuts the
    centre, and pads the last batch (`valid` is False there). `last` ("drop" or "pad") overrides that.
    `threads` decode (default: the cores of this process, shared by the ranks of the node). `cache` is a
    node-local folder to which the data set is staged first, once per node. `device`: where batches are
    delivered (default: the CPU).

    `order`: "full", a uniform permutation of all samples, or "blocks", which reads `block_mib` MiB at a time and each
    byte once an epoch (see datapipe/sampling/block_order.py): for data that are not on a local disk. `io`: "cached",
    "mmap" or "direct" (see datapipe/dataset/shard_reader.py). `backend="webdataset"`, which streams, has neither,
    and tries no read again.

    So many bad samples (damaged, or no readable image) as `max_bad` allows for on a rank are named in the log, and
    their slots are black and not `valid`; one more is an error. An open or a read that fails is tried `retries` times
    again, and then an error: with pauses of 0.1 s, 0.2 s, 0.4 s and so on, 51 s in all for 9, as long as a file server
    takes to be replaced. A consumer that waits for a batch is told each 10 s which read does not answer or is being
    tried again; after `timeout_s` that is an error, too, and so is opening the data set, and a read or write of
    staging it.

    `backend`: "cpu"; "dali" (NVIDIA DALI, on `device`); "webdataset" (streams tar shards, also from URLs such as
    "pipe:ssh server cat shard-{000..146}.tar", see datapipe/loaders/webdataset.py).

    Raises SettingError for a setting out of range, ManifestError when there is no data set at `path`.
    """
    if backend not in BACKENDS:
        raise SettingError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
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
        last=("drop" if train else "pad") if last is None else last,
        io=io,
        block_mib=block_mib,
        max_bad=max_bad,
        retries=retries,
        timeout_s=timeout_s,
    )
    if cache is not None:
        if backend == "webdataset" and not os.path.exists(Path(path) / MANIFEST):
            raise SettingError(f"cache: {path} cannot be staged; allowed: with a packed data set")
        from ..staging import stage_once

        path = stage_once(Path(path), Path(cache), options.timeout_s)
    return importlib.import_module(f".{backend}", __name__).open(path, options, device)
