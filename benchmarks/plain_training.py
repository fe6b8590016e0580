"""A recipe trained by a plain PyTorch loop, as one writes it by hand, on the batches of any peer.

    python -m benchmarks.plain_training PEER CORPUS RECIPE [section.key=value …]

Network, optimizer, learning rates, precision and normalisation are the project's own, so that only the
loop and the loader differ. The last line on standard output is JSON: images, seconds and accuracy.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.peers import Task, open_peer
from datapipe.loaders import normalise
from trainer import models, optim
from trainer.config.recipe import Recipe, load_recipe
from trainer.optim.schedules import multiplier
from trainer.step.precision import choose_precision


def train(peer: str, corpus: Path, recipe: Recipe) -> dict:
    settings, data = recipe.train, recipe.data
    task = Task(size=data.size, channels=1, crop=data.crop, pad=data.pad, flip=data.flip)
    task = replace(task, batch_size=settings.batch_size, seed=settings.seed)
    train_epochs, val_epochs = open_peer(peer, corpus, task), open_peer(peer, corpus, replace(task, train=False))
    precision = choose_precision(settings.precision, torch.device("cpu"))
    steps_per_epoch = len(list((corpus / "images" / "train").glob("*/*"))) // settings.batch_size

    torch.manual_seed(settings.seed)
    model = models.build(recipe.model.name, num_classes=10, in_channels=1)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = optim.build(recipe.optimizer, model)

    step = images = 0
    wait_s = train_s = 0.0
    for epoch in range(settings.epochs):
        model.train()
        started = asked = time.perf_counter()
        for images_BCHW, labels_B in train_epochs(epoch):
            wait_s += time.perf_counter() - asked
            for group in optimizer.param_groups:
                rate = multiplier(recipe.schedule, step, steps_per_epoch, settings.epochs)
                group["lr"] = recipe.optimizer.lr * rate
            with precision.autocast():
                logits_BK = model(normalise(images_BCHW, data.mean, data.std))
            loss = F.cross_entropy(logits_BK.float(), labels_B, label_smoothing=settings.label_smoothing)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            images += len(labels_B)
            asked = time.perf_counter()
        train_s += time.perf_counter() - started
        accuracy = evaluate(model, val_epochs(0), precision, data)
    return {
        "images": images,
        "images_per_s": images / train_s,
        "wait_share": wait_s / train_s,
        "accuracy": accuracy,
    }


@torch.no_grad()
def evaluate(model, batches, precision, data) -> float:
    model.eval()
    correct = count = 0
    for images_BCHW, labels_B in batches:
        with precision.autocast():
            logits_BK = model(normalise(images_BCHW, data.mean, data.std))
        correct += int((logits_BK.argmax(dim=1) == labels_B).sum())
        count += len(labels_B)
    return correct / count


def main() -> int:
    peer, corpus, recipe, *changes = sys.argv[1:]
    print(json.dumps(train(peer, Path(corpus), load_recipe(recipe, changes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
