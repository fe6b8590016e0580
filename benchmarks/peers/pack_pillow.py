"""Pillow in a plain loop: decode, scale, encode, into a tar of Python's `tarfile`; with more processes, one tar each.

Pillow's resize is antialiased with any filter.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

from PIL import Image

from benchmarks.peers.packing import QUALITY, RESTART, SHORT, Job, labelled_files


def shrunk(path: str, variant: str) -> bytes:
    """A JPEG file again as JPEG, with the shorter side of SHORT pixels. `variant`: a filter of Pillow's."""
    encoded = io.BytesIO()
    with Image.open(path) as opened:
        scale = SHORT / min(opened.size)
        size = tuple(round(side * scale) for side in opened.size)
        image = opened.convert("RGB").resize(size, Image.Resampling[variant])
    image.save(encoded, "JPEG", quality=QUALITY, restart_marker_blocks=RESTART)
    return encoded.getvalue()


def pack(job: Job) -> None:
    files = list(enumerate(labelled_files(job.source)))
    if job.workers == 1:
        _write(job.out, 0, files, job.variant)
        return
    with Pool(job.workers) as pool:
        pool.starmap(_write, [(job.out, i, files[i :: job.workers], job.variant) for i in range(job.workers)])


def _write(out: str, worker: int, files: list[tuple[int, tuple[str, int]]], variant: str) -> None:
    with tarfile.open(f"{out}/shard-{worker}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (path, label) in files:
            for extension, data in (("jpg", shrunk(path, variant)), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    for path in sorted(Path(job.out).glob("*.tar")):
        with tarfile.open(path) as tar:
            contents = (tar.extractfile(member).read() for member in tar)
            for image, label in zip(contents, contents, strict=True):
                yield image, int(label)
