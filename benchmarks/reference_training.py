"""A recipe trained as torchvision's reference scripts for classification train: the loop that most begin with.

A folder of files a class, Pillow, a DataLoader whose workers normalise each image as float32, torch's plain SGD, and
the loss and the accuracies of each step read at once. Network, batch, precision and threads are the recipe's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer import models
from trainer.config.recipe import Recipe
from trainer.step.precision import choose_precision

IN_MEMORY = 8  # batches
TOP = 5


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


class Reference:
    """The loop, of which each call of `train` is an epoch.

    Args:
        folder: With a folder of images for each class.
        recipe: What is trained.
        memory_format: Of weights and images; the reference scripts leave them contiguous.
        in_memory: Train on a few batches that are in memory, again and again: what the network alone takes.
    """

    def __init__(self, folder: Path, recipe: Recipe, memory_format: torch.memory_format, in_memory: bool) -> None:
        settings, optimizer = recipe.train, recipe.optimizer
        torch.manual_seed(settings.seed)
        images, workers = ImageFolder(folder, recipe), recipe.data.threads or 2
        self._loader: Iterable = DataLoader(
            images, settings.batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
        )
        self._format, self._smoothing = memory_format, settings.label_smoothing
        self._precision = choose_precision(settings.precision, torch.device("cpu"))
        if in_memory:
            batches = [(self._laid_out(x), y) for x, y in islice(self._loader, IN_MEMORY)]
            self._loader = list(islice(cycle(batches), len(images) // settings.batch_size))
        num_classes, channels = recipe.model.num_classes or images.num_classes, len(recipe.data.mean)
        network = models.build(recipe.model.name, num_classes=num_classes, in_channels=channels)
        self._network = network.to(memory_format=memory_format)
        self._sgd = torch.optim.SGD(network.parameters(), optimizer.lr, optimizer.momentum,
                                    weight_decay=optimizer.weight_decay, nesterov=optimizer.nesterov)  # fmt: skip

    def _laid_out(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW.contiguous(memory_format=self._format)

    def train(self) -> dict[str, float]:
        """Train for an epoch. Return the number of images, the last loss and the mean accuracies in per cent."""
        self._network.train()
        images, loss_now, right, near = 0, math.nan, 0.0, 0.0
        for images_BCHW, labels_B in self._loader:
            with self._precision.autocast():
                logits_BK = self._network(self._laid_out(images_BCHW))
            loss = F.cross_entropy(logits_BK.float(), labels_B, label_smoothing=self._smoothing)
            self._sgd.zero_grad()
            loss.backward()
            self._sgd.step()
            is_right = logits_BK.topk(min(TOP, logits_BK.shape[1])).indices == labels_B[:, None]
            loss_now = loss.item()
            right += is_right[:, 0].sum().item()
            near += is_right.any(1).sum().item()
            images += len(labels_B)
        return {"images": images, "loss": loss_now, "top1": 100 * right / images, "top5": 100 * near / images}
