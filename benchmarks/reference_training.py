"""A recipe trained as torchvision's reference scripts for classification train: the loop that most begin with.

    python -m benchmarks.reference_training IMAGES RECIPE [section.key=value …]

A folder of files a class, Pillow, a DataLoader whose workers normalise each image as float32, torch's plain SGD, and
the loss and the accuracy of each step read at once. Network, batch, precision, threads and learning rate are the
recipe's. The last line on standard output is JSON: images, and images/s from an epoch's first batch on, without the
workers' start.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer import models
from trainer.config.recipe import Recipe, load_recipe
from trainer.precision import choose_precision


class ImageFolder(Dataset):
    """Normalised float32 images [C, H, W], cropped and flipped as the recipe says, and their labels."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self._files = [
            (path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())
        ]
        self._data = recipe.data
        self.num_classes = len(classes)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        path, label = self._files[number]
        data = self._data
        with Image.open(path) as file:
            image = file.convert("L" if len(data.mean) == 1 else "RGB")
        if data.crop == "random_resized":
            image = _random_resized(image, data.size, data.area)
        if data.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels_CHW = torch.from_numpy(np.array(image)).reshape(data.size, data.size, -1).permute(2, 0, 1)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
        return (pixels_CHW.float() / 255).sub_(mean).div_(std), label


def _random_resized(image: Image.Image, size: int, area: tuple[float, float]) -> Image.Image:
    """A window of a random share of the area, with sides of 3:4 to 4:3, scaled to `size`."""
    width, height = image.size
    for _ in range(10):
        share, ratio = random.uniform(*area), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = (round(math.sqrt(width * height * share * r)) for r in (ratio, 1 / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    return image.resize((size, size), Image.Resampling.BILINEAR)


def train(folder: Path, recipe: Recipe) -> dict:
    settings, optimizer = recipe.train, recipe.optimizer
    torch.manual_seed(settings.seed)
    images = ImageFolder(folder, recipe)
    workers = recipe.data.threads or 2
    loader = DataLoader(images, settings.batch_size, shuffle=True, drop_last=True, num_workers=workers)
    precision = choose_precision(settings.precision, torch.device("cpu"))
    model = models.build(recipe.model.name, num_classes=images.num_classes, in_channels=len(recipe.data.mean))
    sgd = torch.optim.SGD(model.parameters(), optimizer.lr, optimizer.momentum, weight_decay=optimizer.weight_decay,
                          nesterov=optimizer.nesterov)  # fmt: skip
    seen, spent_s, losses, right = 0, 0.0, [], 0
    for _ in range(settings.epochs):
        began = None
        for images_BCHW, labels_B in loader:
            if began is None:
                began = time.perf_counter()
                seen -= len(labels_B)  # whose preparation is not in the time
            with precision.autocast():
                logits_BK = model(images_BCHW)
            loss = F.cross_entropy(logits_BK.float(), labels_B, label_smoothing=settings.label_smoothing)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
            right += int((logits_BK.argmax(1) == labels_B).sum())
            seen += len(labels_B)
        spent_s += time.perf_counter() - (began or 0.0)
    return {"images": seen, "images_per_s": seen / spent_s, "loss": losses[-1], "right": right}


def main() -> int:
    folder, recipe, *changes = sys.argv[1:]
    print(json.dumps(train(Path(folder), load_recipe(recipe, changes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
