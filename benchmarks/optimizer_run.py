"""One training of bench_optimizers, in a process of its own: settings as JSON in its argument, what it found as JSON on
standard output.

A batch is summed from parts of 512 images, as 512 images each on several GPUs would be; BN takes its statistics from a
part. The seed decides the first weights, the order of the images and their flips.

The learning rate rises to its value and stays there; what is evaluated is an average of the weights that takes the
place of a falling rate (Shamir and Zhang 2013, section 4, η = 8: about the last ninth of the steps so far). So one run
tells how long each accuracy takes, and no number of epochs need be tuned for it.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

from benchmarks.measure import WORK
from datapipe.fetch import fetch
from trainer import models, optim
from trainer.kfac import EKFAC, KFAC
from trainer.step.precision import choose_precision

PART = 512
WARM_UP = 20_480  # images
EVALUATED_EVERY = 20_480  # images, once an accuracy is near the targets; a third as often before
NEAR = 0.88
TARGETS = (0.90, 0.91, 0.92)
HELD_OUT = 10_000  # of the training images, for tuning
PRECONDITIONERS = {"kfac": KFAC, "ekfac": EKFAC}


@dataclass(frozen=True)
class Run:
    """`optimizer`: a section of a recipe, and `precision` that of one. `kfac`: settings of the preconditioner, if there
    is one. A run ends at the last target, or after `epochs`.

    `tuning`: with the last 10,000 training images held out for the evaluation, and no end at a target; the test images
    are not touched.
    """

    model: str
    batch_size: int
    epochs: float
    optimizer: dict
    kfac: dict = field(default_factory=dict)
    seed: int = 0
    tuning: bool = False
    stop_below: float = 0.0  # ends at half of its epochs with an accuracy below this: a trial that leads nowhere
    device: str = "cpu"
    precision: str = "off"


def data(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Fashion-MNIST: normalised images [N, 1, 28, 28] and labels [N]."""
    files = {path.name: path for path in fetch("fashion-mnist", WORK / "fashion-mnist-idx")}

    def read(kind: str, start: int) -> torch.Tensor:
        content = gzip.decompress(files[f"{split}-{kind}-ubyte.gz"].read_bytes())
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).copy())

    images = read("images-idx3", 16).view(-1, 1, 28, 28)
    return (images.float() / 255 - 0.2860) / 0.3530, read("labels-idx1", 8).long()


def sets(run: Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """To train on, and to evaluate on."""
    images, labels = data("train")
    if not run.tuning:
        return [(images, labels), data("t10k")]
    return [(images[:-HELD_OUT], labels[:-HELD_OUT]), (images[-HELD_OUT:], labels[-HELD_OUT:])]


def averaged(average: torch.Tensor, now: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The average after `number` earlier steps."""
    return average + (now - average) * (9 / (number.item() + 9))


class Training:
    """A network, its optimizer, and what preconditions."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.seed)
        training, self.val = ([tensor.to(run.device) for tensor in tensors] for tensors in sets(run))
        self.images, self.labels = training
        self.precision = choose_precision(run.precision, torch.device(run.device))
        self.parts = run.batch_size // PART
        self.steps_per_epoch = len(self.images) // run.batch_size
        self.steps = round(run.epochs * self.steps_per_epoch)
        self.model = models.build(run.model, num_classes=10, in_channels=1)
        self.model.to(run.device, memory_format=torch.channels_last)
        self.average = AveragedModel(self.model, avg_fn=averaged, use_buffers=True)
        section = dict(run.optimizer)
        kind = section.pop("preconditioner", None)
        self.settings = optim.REGISTRY[section["name"]].Settings(**section)
        self.optimizer = optim.build(self.settings, self.model)
        self.preconditioner = kind and PRECONDITIONERS[kind](self.model, accumulation_steps=self.parts, **run.kfac)

    def step(self, number: int, batch: torch.Tensor) -> None:
        """On the samples `batch`."""
        lr = self.settings.lr * min(1.0, (number + 1) * len(batch) / WARM_UP)
        optim.set_lr(self.optimizer, lr)
        batch, flips = batch.to(self.images.device), (torch.rand(len(batch)) < 0.5).to(self.images.device)
        self._loss(batch, flips, backward=True)
        if self.preconditioner is not None:
            self.preconditioner.lr = lr
            self.preconditioner.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)

    def _loss(self, batch: torch.Tensor, flips: torch.Tensor, backward: bool = False) -> torch.Tensor:
        total = 0
        for part, flip in zip(batch.split(PART), flips.split(PART), strict=True):
            x = torch.where(flip[:, None, None, None], self.images[part].flip(3), self.images[part])
            with self.precision.autocast():
                logits = self.model(x.to(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), self.labels[part]) / self.parts
            if backward:
                loss.backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of the average, on the images to evaluate on."""
        self.average.eval()
        with self.precision.autocast():
            right = sum(
                int((self.average(x).argmax(1) == y).sum())
                for x, y in zip(*(tensor.split(PART) for tensor in self.val), strict=True)
            )
        self.average.train()
        return right / len(self.val[1])


def train(run: Run) -> list[dict]:
    """What each evaluation found: step, epoch, accuracy, and the seconds of training until then."""
    training = Training(run)
    lines, wall_s, cpu_s, order = [], 0.0, 0.0, torch.empty(0, dtype=torch.int64)
    per_epoch, evaluated = training.steps_per_epoch, 0
    for number in range(training.steps):
        if number % per_epoch == 0:
            order = torch.randperm(len(training.images))
        began, cpu_began = time.perf_counter(), time.process_time()
        training.step(number, order[number % per_epoch * run.batch_size :][: run.batch_size])
        if run.device == "cuda":
            torch.cuda.synchronize()
        wall_s, cpu_s = wall_s + time.perf_counter() - began, cpu_s + time.process_time() - cpu_began
        step = number + 1
        near = bool(lines) and lines[-1]["accuracy"] >= NEAR
        due = (step * run.batch_size - evaluated) >= EVALUATED_EVERY * (1 if near else 3)
        if due or step == training.steps:
            evaluated = step * run.batch_size
            line = {"step": step, "epoch": step / per_epoch, "accuracy": training.accuracy(), "wall_s": wall_s,
                    "cpu_s": cpu_s}  # fmt: skip
            if training.preconditioner is not None:
                cosines = training.preconditioner.cosines().values()
                line |= {"cosine": statistics.median(cosines)}
            lines.append(line)
            print(json.dumps(line), file=sys.stderr, flush=True)
            done = line["accuracy"] >= TARGETS[-1] and not run.tuning
            if done or (2 * step >= training.steps and line["accuracy"] < run.stop_below):
                break
    return lines


def main() -> int:
    torch.set_num_threads(1)  # on the processor, two runs at a time
    print(json.dumps(train(Run(**json.loads(sys.argv[1])))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
