"""PyTorch's torchcodec: its JPEG decoder, torchvision's transforms of tensors, torch's DataLoader, on files.

Images are uint8 tensors from the decoder to the batch, which is the fastest that torchvision's documentation knows.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchcodec.decoders import decode_jpeg
from torchvision.transforms import v2

from benchmarks.peers import Epochs, Task
from benchmarks.peers.packing import labelled_files


class Photographs(Dataset):
    def __init__(self, folder: Path, task: Task) -> None:
        self._files = labelled_files(str(folder))
        flips = [v2.RandomHorizontalFlip()] if task.flip else []
        self._prepare = v2.Compose([v2.RandomResizedCrop(task.size, antialias=True), *flips])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        path, label = self._files[i]
        return self._prepare(decode_jpeg(path, mode="RGB")), label


def open_epochs(folder: Path, task: Task) -> Epochs:
    task.need_photographs()
    loader = DataLoader(
        Photographs(folder, task),
        task.batch_size,
        shuffle=True,
        num_workers=task.workers,
        persistent_workers=True,
    )
    return lambda _epoch: loader
