"""How fast a loader is, with nothing behind it."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from .loaders import open_loader
from .manifest import Manifest, find_data_sets


def bench(folder: Path, backend: str, batch_size: int, epochs: int, size: int | None, threads: int | None) -> dict:
    """Iterate over a data set (of several splits: `train`, else the first) and measure.

    `size` in pixels (default: the images' own where they share one, else 224). Returns `images_per_s`,
    `images_per_cpu_s` (CPU seconds of this process and its children, opening the loader included),
    `wait_s`, and per epoch the images and seconds.
    """
    folders = find_data_sets(folder)
    folder = next((path for path in folders if path.name == "train"), folders[0])
    cpu_started = _cpu_s()
    rows = []
    size = _own_size(folder) if size is None else size
    with open_loader(folder, batch_size, backend=backend, size=size, threads=threads) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            started = time.perf_counter()
            num_images = sum(len(batch.labels) for batch in loader)
            seconds = time.perf_counter() - started
            rows.append({"images": num_images, "seconds": seconds, "images_per_s": num_images / seconds})
        images, seconds = sum(row["images"] for row in rows), sum(row["seconds"] for row in rows)
        return {
            "data": str(folder),
            "loader": backend,
            "batch_size": batch_size,
            "size": loader.size,
            "threads": loader.options.num_threads(),
            "images_per_s": images / seconds,
            "images_per_cpu_s": images / (_cpu_s() - cpu_started),
            "wait_s": loader.wait_s,
            "epochs": rows,
        }


def _own_size(folder: Path) -> int:
    manifest = Manifest.read(folder)
    return manifest.width if manifest.width and manifest.width == manifest.height else 224


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
