"""What all peers of bench_faults.py train: images of a packed data set, a network, and an optimizer for it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from datapipe.dataset import DataSet
from trainer import models

MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's training images


class Images(Dataset):
    """Normalised images float[1, H, W] and their labels, read one by one."""

    def __init__(self, folder: Path) -> None:
        self._data_set = DataSet(folder)

    def __len__(self) -> int:
        return len(self._data_set)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        pixels_HWC = torch.from_numpy(self._data_set.pixels(sample, self._data_set.read(sample)).copy())
        image_CHW = (pixels_HWC.permute(2, 0, 1) / 255 - MEAN) / STD
        return image_CHW, int(self._data_set.index[sample]["label"])


def build_network() -> nn.Module:
    return models.build("resnet8", num_classes=10, in_channels=1)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images_BCHW, labels_B = batch
    return F.cross_entropy(model(images_BCHW), labels_B)


def arguments() -> argparse.Namespace:
    """Read the command line that all of them have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder of the training images, packed")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="per rank")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    return parser.parse_args()
