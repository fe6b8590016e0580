"""Whose loaders are compared: one file a loader, and one line here. (`packing.py` has those who pack.)

Each file has one function, `open_epochs(folder, task)`, which returns a function from an epoch's number to an
iterable over that epoch's batches: images uint8[B, C, H, W] and labels int64[B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: who only packs need not wait for it

Epochs = Callable[[int], Iterable[tuple["Tensor", "Tensor"]]]


@dataclass(frozen=True)
class Peer:
    """`module` in this package, whose `open_epochs` is given `options`; `data`: which folder of the corpus it reads;
    `needs`: a library of the peers' environment, in which it then runs; `workers`: in place of the task's."""

    module: str
    data: str
    needs: str = ""
    options: dict[str, str] = field(default_factory=dict)
    workers: int = 0


_OURS, _DALI = "datapipe_loader", {"backend": "dali"}
PEERS = {
    "datapipe, tar": Peer(_OURS, "tar"),
    "datapipe, tar, 1 thread": Peer(_OURS, "tar", workers=1),
    "datapipe, hdf5": Peer(_OURS, "hdf5"),
    "datapipe, lmdb": Peer(_OURS, "lmdb"),
    "datapipe, tar --restart 8": Peer(_OURS, "restart8"),
    "datapipe, dali": Peer(_OURS, "tar", options=_DALI),
    "datapipe, dali --restart 8": Peer(_OURS, "restart8", options=_DALI),
    "datapipe, pixels of 256": Peer(_OURS, "raw256"),
    "datapipe, pixels of 32": Peer(_OURS, "raw32"),
    "ImageFolder + Pillow": Peer("imagefolder", "images"),
    "WebDataset + Pillow": Peer("webdataset_pillow", "tar"),
    "DALI, tar": Peer("dali_tar", "tar"),
    "FFCV, jpg": Peer("ffcv_loader", "ffcv-jpg", "ffcv"),
    "FFCV, smart": Peer("ffcv_loader", "ffcv-smart", "ffcv"),
    "FFCV, raw": Peer("ffcv_loader", "ffcv-raw", "ffcv"),
    "FFCV, raw of 256": Peer("ffcv_loader", "ffcv-raw256", "ffcv"),
    "LitData + Pillow": Peer("litdata_loader", "litdata", "litdata"),
    "MosaicML Streaming + Pillow": Peer("mosaicml_loader", "mds", "mosaicml-streaming"),
    "SPDL": Peer("spdl_loader", "images", "spdl"),
    "SPDL, processes": Peer("spdl_loader", "images", "spdl", {"runs_in": "subprocess"}),
    "torchcodec": Peer("torchcodec_loader", "images", "torchcodec"),
    "Grain + OpenCV": Peer("grain_loader", "arrayrecord", "grain"),
}
EVERYWHERE = tuple(name for name, peer in PEERS.items() if peer.data in ("images", "tar", "hdf5", "lmdb")
                   and peer.module in (_OURS, "imagefolder", "webdataset_pillow")
                   and not peer.options and not peer.workers)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What all are asked to do alike.

    `crop`: "random_resized" (8 to 100 % of the area, scaled to `size`), "pad" (`pad` black pixels around,
    then a random crop of `size`), "centre" (7/8 of the shorter side, scaled to `size`) or "none" (images that
    have `size` already); `flip` mirrors every other image. `train` False: in order, not mirrored, the last batch
    short; whole images of `size` pixels, or the crop "centre". `split`: which to read, unless it is the one that
    `train` says. `workers`: processes, or threads for a loader without processes. `seed`: of the order, for a
    loader that is given one; the others draw from torch's generator.
    """

    size: int
    channels: int
    crop: Literal["random_resized", "pad", "centre", "none"]
    pad: int = 0
    flip: bool = True
    batch_size: int = 256
    workers: int = 2
    train: bool = True
    split: str = ""
    seed: int = 0

    def need_photographs(self, *, or_centre: bool = False) -> None:
        """For a peer that is set up for training on them alone, or for their centre as well. Raises ValueError for
        any other task."""
        trains = self.train and self.crop == "random_resized"
        evaluates = or_centre and not self.train and self.crop == "centre"
        if self.channels != 3 or not (trains or evaluates):
            ways = "RandomResizedCrop" + (", or evaluates the centre," if or_centre else "")
            raise ValueError(f"trains on {ways} of colour images alone, not {self}")


def open_peer(name: str, corpus: Path, task: Task) -> Epochs:
    """Open the training or validation split of a corpus with the named peer."""
    peer = PEERS[name]
    folder = corpus / peer.data / (task.split or ("train" if task.train else "val"))
    task = replace(task, workers=peer.workers or task.workers)
    return import_module(f".{peer.module}", __name__).open_epochs(folder, task, **peer.options)


def describe_decoder(name: str) -> str | None:
    """Say what the named peer decodes with, if that depends on how it was installed."""
    peer = PEERS[name]
    module = import_module(f".{peer.module}", __name__)
    return module.describe_decoder(**peer.options) if hasattr(module, "describe_decoder") else None
