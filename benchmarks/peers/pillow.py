"""What the peers that decode with Pillow do to one image, as in torchvision's reference training.

Random numbers come from `random`, which DataLoader seeds again in each of its workers.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from PIL import Image, ImageOps

from benchmarks.peers import Task

SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # RandomResizedCrop's defaults in torchvision
CENTRE = 224 / 256  # of the shorter side, as in torchvision's evaluations


def prepare(opened: Image.Image, task: Task) -> torch.Tensor:
    """Decode, cut, scale and mirror: uint8[C, H, W]."""
    image = opened.convert("L" if task.channels == 1 else "RGB")
    if task.crop == "centre" or (task.train and task.crop == "random_resized"):
        image = _resized_crop(image, task)
    elif task.train and task.crop == "pad":
        image = _padded_crop(image, task)
    if task.train and task.flip and random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1) if task.channels == 3 else pixels[None]


def choose_window(task: Task, image_width: int, image_height: int) -> tuple[int, int, int, int]:
    """Choose left, top, width and height of what is scaled to the task's size."""
    if task.crop == "centre":
        side = round(CENTRE * min(image_width, image_height))
        return (image_width - side) // 2, (image_height - side) // 2, side, side
    return _random_window(image_width, image_height)


def _resized_crop(image: Image.Image, task: Task) -> Image.Image:
    """Szegedy et al. 2015: the window is cut out first, then scaled with antialiased bilinear weights."""
    left, top, width, height = choose_window(task, *image.size)
    window = image.crop((left, top, left + width, top + height))
    return window.resize((task.size, task.size), Image.Resampling.BILINEAR)


def _random_window(image_width: int, image_height: int) -> tuple[int, int, int, int]:
    area = image_width * image_height
    for _ in range(TRIES):
        aimed = area * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        width, height = round(math.sqrt(aimed * ratio)), round(math.sqrt(aimed / ratio))
        if 0 < width <= image_width and 0 < height <= image_height:
            return random.randint(0, image_width - width), random.randint(0, image_height - height), width, height
    width = min(image_width, round(image_height * RATIO[1]))
    height = min(image_height, round(image_width / RATIO[0]))
    return (image_width - width) // 2, (image_height - height) // 2, width, height


def _padded_crop(image: Image.Image, task: Task) -> Image.Image:
    padded = ImageOps.expand(image, task.pad)
    left, top = random.randint(0, padded.width - task.size), random.randint(0, padded.height - task.size)
    return padded.crop((left, top, left + task.size, top + task.size))
