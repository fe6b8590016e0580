"""Whose loaders are compared: one file a loader, and one line here. (`packing.py` has those who pack.)

Each file has one function, `open_epochs(folder, task)`, which returns a function from an epoch's number to an
iterable over that epoch's batches: images uint8[B, C, H, W] and labels int64[B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: who only packs need not wait for it

Epochs = Callable[[int], Iterable[tuple["Tensor", "Tensor"]]]


@dataclass(frozen=True)
class Peer:
    """`module` in this package; `data`: which folder of the corpus it reads."""

    module: str
    data: Literal["images", "tar", "hdf5", "lmdb"]


PEERS = {
    "datapipe, tar": Peer("datapipe_cpu", "tar"),
    "datapipe, hdf5": Peer("datapipe_cpu", "hdf5"),
    "datapipe, lmdb": Peer("datapipe_cpu", "lmdb"),
    "ImageFolder + Pillow": Peer("imagefolder", "images"),
    "WebDataset + Pillow": Peer("webdataset_pillow", "tar"),
}


@dataclass(frozen=True)
class Task:
    """What all are asked to do alike.

    `crop`: "random_resized" (8 to 100 % of the area, scaled to `size`), "pad" (`pad` black pixels around,
    then a random crop of `size`) or "none" (images that have `size` already); `flip` mirrors every other
    image. `train` False: whole images of `size` pixels in order, the last batch short. `workers`: processes,
    or threads for a loader without processes. `seed`: of the order, for a loader that is given one; the
    others draw from torch's generator.
    """

    size: int
    channels: int
    crop: Literal["random_resized", "pad", "none"]
    pad: int = 0
    flip: bool = True
    batch_size: int = 256
    workers: int = 2
    train: bool = True
    seed: int = 0


def open_peer(name: str, corpus: Path, task: Task) -> Epochs:
    """Open the training or validation split of a corpus with the named peer."""
    peer = PEERS[name]
    folder = corpus / peer.data / ("train" if task.train else "val")
    return import_module(f".{peer.module}", __name__).open_epochs(folder, task)
