"""Train epochs in a process of its own: `python -m benchmarks.train_epochs KIND CORPUS RECIPE THREADS CHANGE…`.

For each line on standard input, an epoch's number or "evaluate", it answers with a line of JSON: images, wall_s and
cpu_s (of this process and its children). KIND is one of KINDS. The reference is a loop as in torchvision's
reference training: a folder of files per class, Pillow, crops, flips and normalisation per image in worker processes,
autocast, loss and accuracies read at each step. Network, optimizer, batch size and precision are the recipe's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import WORK, timed
from benchmarks.peers import Task
from benchmarks.peers.imagefolder import ImageFolder
from trainer import models
from trainer.config.recipe import Recipe, load_recipe
from trainer.distributed import World
from trainer.evaluate import evaluate
from trainer.host_memory import keep_freed_memory
from trainer.job import open_job
from trainer.loop import train_epoch
from trainer.precision import choose_precision
from trainer.reporting.metrics import MetricsFile
from trainer.reporting.timing import Clock
from trainer.state import Losses, State
from trainer.stop import StopSignal

OURS, OURS_IN_MEMORY = "trainer", "trainer, data in memory"
REFERENCE, LAST, LAST_IN_MEMORY = (
    "reference", "reference, channels last", "reference, channels last, data in memory"
)  # fmt: skip
KINDS = (OURS, OURS_IN_MEMORY, REFERENCE, LAST, LAST_IN_MEMORY)
IN_MEMORY = 8  # batches
TOP = 5


class InMemory:
    """A loader that gives the first few batches of another, again and again."""

    def __init__(self, loader) -> None:
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
    """The project's own training loop."""

    def __init__(self, corpus: Path, recipe: Recipe, threads: int, stack: ExitStack, in_memory: bool) -> None:
        keep_freed_memory()
        world = World()
        precision = choose_precision(recipe.train.precision, world.device)
        torch.set_num_threads(threads)
        job = open_job(recipe, corpus / "tar", WORK / "runs", world, precision, Clock(), stack)
        loader = InMemory(job.train_loader) if in_memory else job.train_loader
        self._job = replace(job, train_loader=loader, metrics=MetricsFile(None))

    def train(self, epoch: int) -> int:
        job = self._job
        job.train_loader.set_epoch(epoch)
        train_epoch(job, State(Losses()), StopSignal(job.world, ()))
        return job.steps_per_epoch * job.recipe.train.batch_size

    def evaluate(self) -> int:
        job = self._job
        job.val_loader.set_epoch(0)
        count = job.val_loader.num_samples
        settings = {"num_samples": count, "world": job.world, "precision": job.precision}
        evaluate(job.module, job.val_loader, job.prepare, **settings)
        return count


class Normalised(ImageFolder):
    """Images as the network takes them: float32, normalised."""

    def __init__(self, folder: Path, task: Task, recipe: Recipe) -> None:
        super().__init__(folder, task)
        self._mean, self._std = (
            torch.tensor(numbers)[:, None, None] for numbers in (recipe.data.mean, recipe.data.std)
        )

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(i)
        return (image.float().div_(255) - self._mean) / self._std, label


class Reference:
    """A training loop as torchvision's references have it."""

    def __init__(self, corpus: Path, recipe: Recipe, threads: int, memory_format, in_memory: bool) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(recipe.train.seed)
        data, settings = recipe.data, recipe.train
        task = Task(size=data.size, channels=len(data.mean), crop=data.crop, flip=data.flip)
        self._loader: Iterable = DataLoader(
            Normalised(corpus / "images" / "train", task, recipe),
            settings.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=len(os.sched_getaffinity(0)),
            persistent_workers=True,
        )
        self._steps = len(self._loader)
        if in_memory:
            batches = [(self._laid_out(x, memory_format), y) for x, y in islice(self._loader, IN_MEMORY)]
            self._loader = [batches[step % len(batches)] for step in range(self._steps)]
        self._format, self._precision = memory_format, choose_precision(settings.precision, torch.device("cpu"))
        network = models.build(recipe.model.name, num_classes=recipe.model.num_classes or 10, in_channels=task.channels)
        self._network = network.to(memory_format=memory_format)
        optimizer = recipe.optimizer
        chosen = {
            "momentum": optimizer.momentum,
            "nesterov": optimizer.nesterov,
            "weight_decay": optimizer.weight_decay,
        }
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, **chosen)
        self._batch_size, self._smoothing = settings.batch_size, settings.label_smoothing

    @staticmethod
    def _laid_out(images: Tensor, memory_format) -> Tensor:
        return images.contiguous(memory_format=memory_format)

    def train(self, epoch: int) -> int:
        self._network.train()
        sums = [0.0] * 3
        for images, labels in self._loader:
            with self._precision.autocast():
                logits = self._network(self._laid_out(images, self._format))
                loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            right = logits.topk(TOP).indices == labels[:, None]
            figures = loss.item(), right[:, 0].float().mean().item(), right.any(1).float().mean().item()
            sums = [total + figure for total, figure in zip(sums, figures, strict=True)]
        return self._steps * self._batch_size


def open_kind(kind: str, corpus: Path, recipe: Recipe, threads: int, stack: ExitStack) -> Ours | Reference:
    """What trains as KIND says."""
    if kind in (OURS, OURS_IN_MEMORY):
        return Ours(corpus, recipe, threads, stack, kind == OURS_IN_MEMORY)
    memory_format = torch.contiguous_format if kind == REFERENCE else torch.channels_last
    return Reference(corpus, recipe, threads, memory_format, kind == LAST_IN_MEMORY)


def main() -> int:
    kind, corpus, name, threads, *changes = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    with ExitStack() as stack:
        training = open_kind(kind, Path(corpus), load_recipe(name, changes), int(threads), stack)
        for line in sys.stdin:
            with timed() as seconds:
                images = training.evaluate() if line.strip() == "evaluate" else training.train(int(line))
            answers.write(json.dumps({"images": images, **seconds}) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
