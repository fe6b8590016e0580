"""How fast a loader is, which of its stages limits it, and whether that is enough for an accelerator."""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

from . import watched
from .dataset.manifest import Manifest, find_data_sets
from .loaders import Loader, open_loader
from .loaders.engine import Engine
from .loaders.native_pixels import choose_native
from .sampling.augment import Augment
from .watched import TIMEOUT_S

_STAGES = ("read", "window", "decode", "resize", "copy", "other")
NOISE = 0.05  # of the time: less waiting than that says nothing
CONSUMER = "the consumer"


def bench(
    folder: Path, backend: str, batch_size: int, epochs: int, size: int | None, step_s: float = 0.0, **settings: Any
) -> dict[str, Any]:
    """Iterate over a data set (of several splits: `train`, else the first) and measure.

    Args:
        folder: The data set, or the folder of its splits.
        backend: Backend of `open_loader`.
        batch_size: Images per batch, from 1.
        epochs: Number of times to iterate over the data set, from 1.
        size: Size of the images in pixels (default: their own if they share one, else 224).
        step_s: Seconds that the consumer waits, in place of an accelerator, with each batch.
        settings: Other settings of `open_loader`, and `crop` of `Augment`.

    Returns:
        - `decoder_in_c`: which is in use, if any, and why no better one;
        - `images_per_s`, `images_per_cpu_s` (CPU seconds of this process and its children, opening the loader
          included), and per epoch the images and seconds;
        - `threads_that_fill`: threads that read, and decode unless a device does;
        - `first_batch_s`: from opening the loader to its first batch;
        - `stages_s`: seconds by the clock of all threads in each stage, waiting because the queue is full
          (`queue_full`), and of the consumer, waiting because it is empty (`queue_empty`); `limit`: the stage that
          takes longest, or the consumer;
        - with `step_s`, what `_compare_with_steps` returns.
    """
    folders = watched.call(partial(find_data_sets, folder), TIMEOUT_S, folder)
    folder = next((path for path in folders if path.name == "train"), folders[0])
    cpu_began, began = _cpu_s(), time.perf_counter()
    size = _own_size(folder) if size is None else size
    augment = Augment(settings.pop("crop", "auto"))
    with open_loader(folder, batch_size, backend=backend, size=size, augment=augment, **settings) as loader:
        rows, first_batch_at = _iterate(loader, epochs, step_s)
        stages, threads = loader.stages(), loader.options.num_threads()
        fillers = loader.decoder.count_threads(loader.options) if isinstance(loader, Engine) else threads
    cpu_s = _cpu_s() - cpu_began
    images, seconds = sum(row["images"] for row in rows), sum(row["seconds"] for row in rows)
    result = {
        "data": str(folder),
        "backend": backend,
        "batch_size": batch_size,
        "size": size,
        "threads": threads,
        "threads_that_fill": fillers,
        "decoder_in_c": str(choose_native()),
        "images_per_s": images / seconds,
        "images_per_cpu_s": images / cpu_s,
        "first_batch_s": None if first_batch_at is None else first_batch_at - began,
        "wait_s": stages["queue_empty"],
        "stages_s": stages,
        "limit": find_limit(stages, stages["queue_empty"] / seconds),
        "epochs": rows,
    }
    return result | (_compare_with_steps(rows, batch_size, step_s, cpu_s / images) if step_s else {})


def _compare_with_steps(rows: list[dict[str, float]], batch_size: int, step_s: float, cpu_s: float) -> dict[str, float]:
    """Return what a loader that takes `cpu_s` CPU seconds per image is to an accelerator.

    `wanted_images_per_s`: the most that its steps can take; `utilisation`: the share of the time in which it did not
    wait for data (accelerator utilisation as in MLPerf Storage: time of computation by time in all); `enough_cores`:
    how many cores would provide that many images.
    """
    most_per_s, seconds = batch_size / step_s, sum(row["seconds"] for row in rows)
    return {
        "step_s": step_s,
        "wanted_images_per_s": most_per_s,
        "utilisation": sum(row["step_s"] for row in rows) / seconds,
        "enough_cores": most_per_s * cpu_s,
    }


def _iterate(loader: Loader, epochs: int, step_s: float) -> tuple[list[dict[str, float]], float | None]:
    """Return each epoch's images, seconds and steps' seconds, and when the first batch came (by time.perf_counter)."""
    rows: list[dict[str, float]] = []
    first_batch_at = None
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        began, num_images, slept_s = time.perf_counter(), 0, 0.0
        for batch in loader:
            if first_batch_at is None:
                first_batch_at = time.perf_counter()
            num_images += len(batch.labels)
            step_began = time.perf_counter()
            time.sleep(step_s)  # a little longer, which counts where a step is short
            slept_s += time.perf_counter() - step_began
        seconds = time.perf_counter() - began
        rows.append({"images": num_images, "seconds": seconds, "step_s": slept_s, "images_per_s": num_images / seconds})
    return rows, first_batch_at


def format_result(result: dict[str, Any]) -> list[str]:
    """Write what `bench` returned as lines for a reader."""
    lines = [
        f"{result['images_per_s']:,.0f} images/s, {result['images_per_cpu_s']:,.0f} images per CPU-second "
        f"({result['threads']} threads, {result['size']} pixels, batches of {result['batch_size']}); "
        f"first batch after {result['first_batch_s']:.2f} s"
    ]
    if not result["decoder_in_c"].endswith((" AVX2", " NEON")):
        lines.append(f"decoder in C: {result['decoder_in_c']}")
    stages = result["stages_s"]
    known = {name: stages[name] for name in _STAGES if stages.get(name)}
    if known:
        images = sum(row["images"] for row in result["epochs"])
        parts = ", ".join(f"{name} {1e6 * seconds / images:,.0f}" for name, seconds in known.items())
        lines.append(f"microseconds per image, in the threads: {parts}")
    seconds = sum(row["seconds"] for row in result["epochs"])
    waited = stages["queue_empty"] / seconds
    limit = f"limited by {result['limit']}: the consumer waited {waited:.0%} of the time for batches"
    if "queue_full" in stages:
        limit += f", the threads {stages['queue_full'] / seconds / result['threads_that_fill']:.0%} for room"
    lines.append(limit)
    if "utilisation" in result:
        lines.append(
            f"steps of {1000 * result['step_s']:g} ms take {result['wanted_images_per_s']:,.0f} images/s at most: "
            f"utilisation {result['utilisation']:.1%}; {result['enough_cores']:.1f} cores like these would be enough"
        )
    return lines


def find_limit(stages: dict[str, float], waited: float) -> str:
    """Name the stage that takes longest, or the consumer if it `waited` for hardly any (share) of the time."""
    known = [name for name in _STAGES if name in stages]
    if waited <= NOISE:
        return CONSUMER
    return max(known, key=stages.__getitem__, default="the loader, which measures no stages")


def _own_size(folder: Path) -> int:
    """Return the side of square images that share one size, else 224."""
    manifest = watched.call(partial(Manifest.read, folder), TIMEOUT_S, folder)
    return manifest.width if manifest.width and manifest.width == manifest.height else 224


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
