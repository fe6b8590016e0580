"""Who packs: one file each, and one line here.

Each file, `pack_*.py`, has two functions: `pack(job)` lists the source and packs it into `job.out`, and `read(job)`
yields what was packed, encoded image and label, through that library's own reader where it has one for encoded images.
`pack.py` runs them in a process of their own, with the Python of their environment.
"""

from __future__ import annotations

import io
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import WORK
from benchmarks.peers import Peer

SHORT, QUALITY, RESTART = 256, 90, 8  # of re-encoded images: shorter side, JPEG quality, MCUs between restart markers
PEERS_VENV = WORK / "peers-venv"
STATUS = "status.tsv"  # in that environment: what setup.sh reports


@dataclass(frozen=True)
class Job:
    """`source`: a folder with CLASS/*.jpg; `out`: an empty folder; `variant`: what of several a file can do.

    `workers`: processes or threads; 0, for datapipe alone: as many as it takes by itself.
    """

    source: str
    out: str
    resize: bool
    workers: int
    variant: str = ""


@dataclass(frozen=True)
class Packer:
    """`module` in this package; `needs`: the library of the peers' environment that it runs in, if it needs one.

    `program`: it starts another program, whose process is the whole of it.
    """

    module: str
    needs: str = ""
    workers: int = 2
    variant: str = ""
    program: bool = False

    def job(self, source: Path, out: Path, resize: bool) -> Job:
        return Job(str(source), str(out), resize, self.workers, self.variant)


SECTIONS = {
    "copy": {
        "tar cf": Packer("pack_tar", workers=1, program=True),
        "datapipe, tar": Packer("pack_datapipe", variant="tar"),
        "datapipe, hdf5": Packer("pack_datapipe", variant="hdf5"),
        "datapipe, lmdb": Packer("pack_datapipe", variant="lmdb"),
        "datapipe, zip": Packer("pack_datapipe", variant="zip"),
        "datapipe, tfrecord": Packer("pack_datapipe", variant="tfrecord"),
        "WebDataset": Packer("pack_webdataset", "webdataset", workers=1),
        "WebDataset, 2 processes": Packer("pack_webdataset", "webdataset"),
        "MosaicML Streaming": Packer("pack_mosaicml", "mosaicml-streaming", workers=1),
        "MosaicML Streaming, 2 processes": Packer("pack_mosaicml", "mosaicml-streaming"),
        "LitData": Packer("pack_litdata", "litdata"),
        "FFCV, bytes": Packer("pack_ffcv", "ffcv"),
    },
    "resize": {
        "datapipe, tar": Packer("pack_datapipe", variant="tar"),
        "Pillow, Lanczos": Packer("pack_pillow", workers=1, variant="LANCZOS"),
        "Pillow, Lanczos, 2 processes": Packer("pack_pillow", variant="LANCZOS"),
        "Pillow, bilinear": Packer("pack_pillow", workers=1, variant="BILINEAR"),
        "Pillow, bilinear, 2 processes": Packer("pack_pillow", variant="BILINEAR"),
        "LitData + Pillow, bilinear": Packer("pack_litdata", "litdata", variant="BILINEAR"),
        "FFCV, jpg": Packer("pack_ffcv", "ffcv"),
    },
}
SECTIONS["disk"] = {
    "tar cf": SECTIONS["copy"]["tar cf"],
    "datapipe pack": Packer("pack_datapipe", workers=0, variant="command", program=True),
    "WebDataset": SECTIONS["copy"]["WebDataset"],
}


def missing(packer: Packer | Peer, venv: Path = PEERS_VENV) -> str | None:
    """Why a packer, or whoever else `needs` a library, cannot run here, or None."""
    if not packer.needs:
        return None
    status = venv / STATUS
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        name, state, detail = line.split("\t", 2)
        if name == packer.needs:
            return None if state == "installed" else detail
    return f"not set up in {venv.name}: run benchmarks/peers/setup.sh"


def versions(venv: Path = PEERS_VENV) -> dict[str, str]:
    """The versions of the libraries that are installed in the peers' environment."""
    status = venv / STATUS
    lines = (line.split("\t", 2) for line in status.read_text().splitlines()) if status.exists() else ()
    return {name: detail for name, state, detail in lines if state == "installed"}


def python_with(library: str, venv: Path = PEERS_VENV) -> str:
    """The Python that has a library of the peers' environment, whether in an environment of its own or with the others;
    this one for none."""
    own = venv / library / "bin" / "python"
    return sys.executable if not library else str(own if own.exists() else venv / "bin" / "python")


def command(packer: Packer, action: str, arguments: str, venv: Path = PEERS_VENV) -> list[str]:
    """What runs `pack` or `check` in a process of its own, from the repository's root."""
    return [python_with(packer.needs, venv), "-m", "benchmarks.peers.pack", action, packer.module, arguments]


def labelled_files(source: str) -> list[tuple[str, int]]:
    """Path and label of every image, shuffled once, as one does before packing."""
    with os.scandir(source) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    files = [
        (os.path.join(source, name, file), label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(os.path.join(source, name)))
    ]
    random.Random(0).shuffle(files)
    return files


def read_files(source: Path) -> Iterator[tuple[bytes, int]]:
    return ((Path(path).read_bytes(), label) for path, label in labelled_files(str(source)))


def summary(images: Iterable[tuple[bytes, int]]) -> dict:
    """Of encoded images and their labels in any order: what must be the same of the source and what was packed."""
    from PIL import Image

    total, content, labels, short_sides = 0, 0, Counter(), set()
    for data, label in images:
        total += len(data)
        content += zlib.crc32(data, label)
        labels[label] += 1
        with Image.open(io.BytesIO(data)) as image:
            short_sides.add(min(image.size))
    return {
        "images": labels.total(),
        "image_bytes": total,
        "labels": [labels[label] for label in sorted(labels)],
        "content": content,
        "short_sides": [min(short_sides, default=0), max(short_sides, default=0)],
    }
