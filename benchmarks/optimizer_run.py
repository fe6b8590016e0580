"""One training of bench_optimizers, in a process of its own: settings as JSON on standard input, what it found as JSON
on standard output.

A batch is summed from parts of 512 images, as 512 images each on several GPUs would be; BN takes its statistics from a
part. The seed decides the first weights, the order of the images and their flips.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import WORK
from datapipe.fetch import fetch
from trainer import models, optim
from trainer.kfac import EKFAC, KFAC
from trainer.optim.schedules import multiplier
from trainer.recipe import OneCycleSchedule

PART = 512
EVALUATED_EVERY = 20_480  # images
TARGETS = (0.90, 0.91, 0.92)
PRECONDITIONERS = {"kfac": KFAC, "ekfac": EKFAC}


@dataclass(frozen=True)
class Run:
    """`optimizer`: a section of a recipe. `kfac`: settings of the preconditioner, if there is one. The learning rate
    rises over the first tenth of `epochs`, and falls to zero with the last.
    """

    model: str
    batch_size: int
    epochs: float
    optimizer: dict
    kfac: dict = field(default_factory=dict)
    seed: int = 0
    stop_below: float = 0.0  # ends after an epoch with an accuracy below this: a trial that leads nowhere


def data(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Fashion-MNIST: normalised images [N, 1, 28, 28] and labels [N]."""
    files = {path.name: path for path in fetch("fashion-mnist", WORK / "fashion-mnist-idx")}
    read = lambda kind, start: np.frombuffer(gzip.decompress(files[f"{split}-{kind}-ubyte.gz"].read_bytes()), np.uint8, offset=start)  # noqa: E501, E731
    images = torch.from_numpy(read("images-idx3", 16).copy()).view(-1, 1, 28, 28)
    return (images.float() / 255 - 0.2860) / 0.3530, torch.from_numpy(read("labels-idx1", 8).astype(np.int64))


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(PART), labels.split(PART), strict=True))
    model.train()
    return right / len(labels)


def train(run: Run) -> list[dict]:
    """What each evaluation found: step, epoch, accuracy, and the seconds of training until then."""
    (images, labels), val = data("train"), data("t10k")
    torch.manual_seed(run.seed)
    model = models.build(run.model, num_classes=10, in_channels=1).to(memory_format=torch.channels_last)
    section = dict(run.optimizer)
    kind = section.pop("preconditioner", None)
    settings = optim.REGISTRY[section["name"]].Settings(**section)
    optimizer = optim.build(settings, model)
    parts = run.batch_size // PART
    preconditioner = PRECONDITIONERS[kind](model, accumulation_steps=parts, **run.kfac) if kind else None
    steps_per_epoch = len(images) // run.batch_size
    steps = round(run.epochs * steps_per_epoch)
    schedule = OneCycleSchedule(name="onecycle", peak_at=0.1, start=0.05)
    found, wall_s, cpu_s, order = [], 0.0, 0.0, torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(images))
        began, cpu_began = time.perf_counter(), time.process_time()
        batch = order[step % steps_per_epoch * run.batch_size :][: run.batch_size]
        lr = settings.lr * multiplier(schedule, step, steps, 1)
        optim.set_lr(optimizer, lr)
        for part in batch.split(PART):
            x = torch.where((torch.rand(len(part)) < 0.5)[:, None, None, None], images[part].flip(3), images[part])
            (F.cross_entropy(model(x.to(memory_format=torch.channels_last)), labels[part]) / parts).backward()
        if preconditioner is not None:
            preconditioner.lr = lr
            preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()
        wall_s, cpu_s = wall_s + time.perf_counter() - began, cpu_s + time.process_time() - cpu_began
        done = (step + 1) * run.batch_size
        if done // EVALUATED_EVERY > (done - run.batch_size) // EVALUATED_EVERY or step + 1 == steps:
            line = {"step": step + 1, "epoch": (step + 1) / steps_per_epoch, "accuracy": accuracy(model, *val),
                    "wall_s": wall_s, "cpu_s": cpu_s}  # fmt: skip
            found.append(line)
            if preconditioner is not None:
                line["cosine"] = float(np.median(list(preconditioner.cosines().values())))
            print(json.dumps(line), file=sys.stderr, flush=True)
            if line["accuracy"] >= TARGETS[-1] or (line["epoch"] >= 1 and line["accuracy"] < run.stop_below):
                break
    return found


def main() -> int:
    torch.set_num_threads(1)  # two runs at a time
    print(json.dumps(train(Run(**json.load(sys.stdin)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
