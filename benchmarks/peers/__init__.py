"""Whose loaders are compared: one file a loader, and one line here. (`packing.py` has those who pack.)

Each file has one function, `open_epochs(folder, task)`, which returns a function from an epoch's number to an
iterable over that epoch's batches: images uint8[B, C, H, W] and labels int64[B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: who only packs need not wait for it

Epochs = Callable[[int], Iterable[tuple["Tensor", "Tensor"]]]


@dataclass(frozen=True)
class Peer:
    """`module` in this package, whose `open_epochs` is given `options`; `data`: which folder of the corpus it reads;
    `needs`: a library of the peers' environment, in which it then runs."""

    module: str
    data: str
    needs: str = ""
    options: dict[str, str] = field(default_factory=dict)


_OURS, _DALI = "datapipe_loader", {"backend": "dali"}
PEERS = {
    "datapipe, tar": Peer(_OURS, "tar"),
    "datapipe, hdf5": Peer(_OURS, "hdf5"),
    "datapipe, lmdb": Peer(_OURS, "lmdb"),
    "datapipe, tar --restart 8": Peer(_OURS, "restart8"),
    "datapipe, dali": Peer(_OURS, "tar", options=_DALI),
    "datapipe, dali --restart 8": Peer(_OURS, "restart8", options=_DALI),
    "datapipe, pixels of 256": Peer(_OURS, "raw256"),
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
}
EVERYWHERE = tuple(name for name, peer in PEERS.items() if peer.data in ("images", "tar", "hdf5", "lmdb")
                   and peer.module in (_OURS, "imagefolder", "webdataset_pillow") and not peer.options)  # fmt: skip


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

    def need_photographs(self) -> None:
        """For a peer that is set up for that alone. Raises ValueError for any other task."""
        if not self.train or self.crop != "random_resized" or self.channels != 3:
            raise ValueError(f"trains on RandomResizedCrop of colour images alone, not {self}")


def open_peer(name: str, corpus: Path, task: Task) -> Epochs:
    """Open the training or validation split of a corpus with the named peer."""
    peer = PEERS[name]
    folder = corpus / peer.data / ("train" if task.train else "val")
    return import_module(f".{peer.module}", __name__).open_epochs(folder, task, **peer.options)
