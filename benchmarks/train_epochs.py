"""Train epochs in a process of its own: `python -m benchmarks.train_epochs WAY CORPUS RECIPE THREADS CHANGE…`.

For each line on standard input, an epoch's number or "evaluate", it answers with a line of JSON: images, wall_s and
cpu_s (of this process and its children), and for an epoch of the trainer wait_s, for which steps waited for batches.
WAY is one of WAYS; CORPUS holds the images as files, in `images`, and packed, in the folder that the way reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch

from benchmarks.measure import WORK, open_answers, timed
from benchmarks.reference_training import IN_MEMORY, Reference
from datapipe.loaders import Loader
from trainer.config.recipe import Recipe, load_recipe
from trainer.ranks.memory import keep_freed_memory
from trainer.ranks.stop import StopSignal
from trainer.ranks.world import World
from trainer.reporting.metrics import MetricsFile
from trainer.reporting.timing import Clock
from trainer.run.evaluate import evaluate
from trainer.run.job import open_job
from trainer.run.loop import train_epoch
from trainer.run.state import Losses, State

OURS, OURS_SMALL, OURS_IN_MEMORY = "trainer", "trainer, stored at 160 pixels", "trainer, images in memory"
OURS_WITHOUT_C = "trainer, nothing decoded in C"  # started with DATAPIPE_NATIVE=0
REFERENCE, LAST, NETWORK = "reference loop", "reference loop, channels last", "network alone, channels last"
# Which packed data set ours read.
FOLDERS = {OURS: "tar", OURS_WITHOUT_C: "tar", OURS_SMALL: "short160", OURS_IN_MEMORY: "tar"}
WAYS = (*FOLDERS, REFERENCE, LAST, NETWORK)


class InMemory:
    """A loader that gives the first few batches of another, again and again."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches = list(islice(iter(loader), IN_MEMORY))
        loader.set_epoch(0)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        yield from islice(cycle(self._batches), len(self))

    def __getattr__(self, name: str):
        return getattr(self._loader, name)


class Ours:
    """The project's own training loop, as `trainer train` sets it up on a processor."""

    def __init__(self, data: Path, recipe: Recipe, in_memory: bool, stack: ExitStack) -> None:
        keep_freed_memory()
        world = World()
        self._clock = Clock()
        job = open_job(recipe, data, WORK / "runs", world, self._clock, stack)
        loader = InMemory(job.train_loader) if in_memory else job.train_loader
        self._job = replace(job, train_loader=loader, metrics=MetricsFile(None))

    def train(self, epoch: int) -> dict[str, float]:
        """Train for an epoch; return the number of images, and the seconds for which steps waited for them."""
        job = self._job
        self._clock.begin_epoch()
        job.train_loader.set_epoch(epoch)
        train_epoch(job, State(Losses()), StopSignal(job.world, ()))
        self._clock.drain()
        images = job.steps_per_epoch * job.recipe.train.batch_size
        return {"images": images, "wait_s": self._clock.epoch()["wait"]}

    def evaluate(self) -> dict[str, float]:
        """Evaluate; return the number of images."""
        job = self._job
        job.val_loader.set_epoch(0)
        count = job.val_loader.num_samples
        evaluate(job.module, job.val_loader, num_samples=count, world=job.world, precision=job.precision)
        return {"images": count}


def main() -> int:
    way, corpus, name, threads, *changes = sys.argv[1:]
    recipe = load_recipe(name, changes)
    torch.set_num_threads(int(threads))
    tell = open_answers()
    with ExitStack() as stack:
        if way in FOLDERS:
            ours = Ours(Path(corpus, FOLDERS[way]), recipe, way == OURS_IN_MEMORY, stack)
        else:
            memory_format = torch.contiguous_format if way == REFERENCE else torch.channels_last
            loop = Reference(Path(corpus, "images", "train"), recipe, memory_format, way == NETWORK)
        for line in sys.stdin:
            with timed() as seconds:
                if way not in FOLDERS:
                    answer = {"images": loop.train()["images"]}
                else:
                    answer = ours.evaluate() if line.strip() == "evaluate" else ours.train(int(line))
            tell(answer | seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
