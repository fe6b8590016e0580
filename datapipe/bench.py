"""How fast a loader is, which of its stages limits it, and whether that is enough for an accelerator."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from .dataset.manifest import Manifest, find_data_sets
from .loaders import open_loader
from .sampling.augment import Augment

STAGES = ("read", "window", "decode", "resize", "copy", "other")
WAITED = 0.05  # of the time: less waiting than that is noise
CONSUMER = "the consumer"


def bench(
    folder: Path, backend: str, batch_size: int, epochs: int, size: int | None, step_s: float = 0.0, **settings
) -> dict:
    """Iterate over a data set (of several splits: `train`, else the first) and measure.

    `size` in pixels (default: the images' own where they share one, else 224); `step_s`: what the consumer, in place
    of an accelerator, does with each batch: nothing, for so long; `settings`: of `open_loader`. Returns

    - `images_per_s`, `images_per_cpu_s` (CPU seconds of this process and its children, opening the loader included),
      and per epoch the images and seconds;
    - `first_batch_s`: from opening the loader to its first batch;
    - `stages_s`: seconds of all threads in each stage, waiting because the queue is full (`queue_full`), and of the
      consumer, waiting because it is empty (`queue_empty`); `limit`: the stage that takes longest, or the consumer;
    - with `step_s`: `wanted_images_per_s`, at most taken; `utilisation`: the share of the time in which the consumer
      did not wait for data (accelerator utilisation as in MLPerf Storage: time of computation by time in all);
      `enough_cores`: how many cores would provide that many images.
    """
    folders = find_data_sets(folder)
    folder = next((path for path in folders if path.name == "train"), folders[0])
    cpu_started, opened = _cpu_s(), time.perf_counter()
    rows, first_batch_s = [], None
    size = _own_size(folder) if size is None else size
    with open_loader(folder, batch_size, backend=backend, size=size, augment=Augment(), **settings) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            started, num_images = time.perf_counter(), 0
            for batch in loader:
                if first_batch_s is None:
                    first_batch_s = time.perf_counter() - opened
                num_images += len(batch.labels)
                time.sleep(step_s)
            seconds = time.perf_counter() - started
            rows.append({"images": num_images, "seconds": seconds, "images_per_s": num_images / seconds})
        images, seconds = sum(row["images"] for row in rows), sum(row["seconds"] for row in rows)
        stages = loader.stages()
        threads = loader.options.num_threads()
    cpu_s = _cpu_s() - cpu_started
    waited = stages["queue_empty"] / seconds
    result = {
        "data": str(folder),
        "loader": backend,
        "batch_size": batch_size,
        "size": size,
        "threads": threads,
        "images_per_s": images / seconds,
        "images_per_cpu_s": images / cpu_s,
        "first_batch_s": first_batch_s,
        "wait_s": stages["queue_empty"],
        "stages_s": stages,
        "limit": _limit(stages, waited),
        "epochs": rows,
    }
    if step_s:
        wanted = batch_size / step_s
        computed_s = step_s * images / batch_size
        result |= {
            "step_s": step_s,
            "wanted_images_per_s": wanted,
            "utilisation": min(1.0, computed_s / seconds),
            "enough_cores": wanted * cpu_s / images,
        }
    return result


def told(result: dict) -> list[str]:
    """The result as lines for a reader."""
    lines = [
        f"{result['images_per_s']:,.0f} images/s, {result['images_per_cpu_s']:,.0f} images a CPU-second "
        f"({result['threads']} threads, {result['size']} pixels, batches of {result['batch_size']}); "
        f"first batch after {result['first_batch_s']:.2f} s"
    ]
    stages = result["stages_s"]
    known = {name: stages[name] for name in STAGES if stages.get(name)}
    if known:
        images = sum(row["images"] for row in result["epochs"])
        parts = ", ".join(f"{name} {1e6 * seconds / images:,.0f}" for name, seconds in known.items())
        lines.append(f"microseconds an image, in the threads: {parts}")
    seconds = sum(row["seconds"] for row in result["epochs"])
    waited = stages["queue_empty"] / seconds
    limit = f"limited by {result['limit']}: the consumer waited {waited:.0%} of the time for batches"
    if "queue_full" in stages:
        limit += f", the threads {stages['queue_full'] / seconds / result['threads']:.0%} for room"
    lines.append(limit)
    if "utilisation" in result:
        lines.append(
            f"steps of {1000 * result['step_s']:g} ms take {result['wanted_images_per_s']:,.0f} images/s at most: "
            f"utilisation {result['utilisation']:.1%}; {result['enough_cores']:.1f} cores like these would be enough"
        )
    return lines


def _limit(stages: dict[str, float], waited: float) -> str:
    known = [name for name in STAGES if name in stages]
    if waited <= WAITED:
        return CONSUMER
    return max(known, key=stages.__getitem__, default="the loader, which tells nothing of its stages")


def _own_size(folder: Path) -> int:
    manifest = Manifest.read(folder)
    return manifest.width if manifest.width and manifest.width == manifest.height else 224


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
