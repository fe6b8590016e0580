"""Loaders: one file for each backend, and one line in `datapipe/names.py`."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..dataset.manifest import MANIFEST
from ..errors import SettingError
from .base import Loader
from .batch import Batch
from .device import normalise
from .options import LoaderOptions, takes_settings

__all__ = ["Batch", "Loader", "LoaderOptions", "normalise", "open_loader"]


@takes_settings(LoaderOptions)
def open_loader(path: Path | str, options: LoaderOptions) -> Loader:
    """Open one packed data set (one split) for one rank.

    Iterate over the loader once per epoch. Training shuffles, crops and mirrors; evaluation goes in order and crops the
    centre. Settings have the same names and defaults in LoaderOptions, recipes and `datapipe bench`.

    Args:
        path: The data set's folder; with backend "webdataset" also a folder of tar shards, or URLs such as
            "pipe:ssh server cat shard-{000..146}.tar".
        options: Settings, each of them an argument: see LoaderOptions.

    Returns:
        A Loader, to be closed, or used in a `with`. Its batches hold uint8 images of `size` × `size` pixels.

    Raises:
        SettingError: For a setting out of its range.
        ManifestError: When there is no data set at `path`.
    """
    if options.split is not None and os.path.isdir(Path(path) / options.split):
        path, options = Path(path) / options.split, replace(options, split=None)
    elif options.split is not None and options.backend != "webdataset":
        raise SettingError(f"split: {options.split!r} is not in {path}")
    with ExitStack() as holds:
        arriving: dict[str, Path] = {}
        if options.cache is not None:
            folder, is_whole = _open_cache(Path(path), Path(options.cache), options, holds)
            path, arriving = (folder, {}) if is_whole else (path, {"local": folder})
        make_loader = importlib.import_module(f".{options.backend}", __name__).make_loader
        loader: Loader = make_loader(path, options, **arriving)
        loader.holds = holds.pop_all()
    return loader


def _open_cache(source: Path, cache: Path, options: LoaderOptions, holds: ExitStack) -> tuple[Path, bool]:
    """Stage a data set; return its copy, and whether that is whole, or still arrives."""
    from ..staging import StageOptions
    from ..staging.copy import open_cache

    is_streamed = options.backend == "webdataset"
    if is_streamed and not os.path.exists(source / MANIFEST):
        raise SettingError(f"cache: {source} cannot be staged; allowed: with a packed data set")
    staging = StageOptions(timeout_s=options.timeout_s)
    return open_cache(source, cache, staging, holds, accepts_part=not is_streamed)
