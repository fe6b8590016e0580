"""The usual way: a folder of files a class, Pillow, torch's DataLoader (as torchvision's ImageFolder does)."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers import Epochs, Task
from benchmarks.peers.pillow import prepare


class ImageFolder(Dataset):
    def __init__(self, folder: Path, task: Task) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._files = [
            (str(path), label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())
        ]
        self._task = task

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        path, label = self._files[i]
        with open(path, "rb") as file, Image.open(file) as image:
            return prepare(image, self._task), label


def open_epochs(folder: Path, task: Task) -> Epochs:
    loader = DataLoader(
        ImageFolder(folder, task),
        task.batch_size,
        shuffle=task.train,
        drop_last=task.train,
        num_workers=task.workers,
        persistent_workers=True,
    )
    return lambda _epoch: loader
