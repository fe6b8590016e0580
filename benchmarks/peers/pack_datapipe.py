"""This project's `datapipe pack`, with its checksums, index, and synced files. Variant "command": as a program."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.packing import QUALITY, RESTART, SHORT, Job
from datapipe.dataset import DataSet
from datapipe.formats import shard_format
from datapipe.images.recode import RecodeOptions
from datapipe.names import FORMATS
from datapipe.packing import PackOptions
from datapipe.packing import pack as pack_data_set
from datapipe.sources import MODULES

# What it imports only when it needs it. The figures of the packing alone are without imports, the others', too.
for name in MODULES:
    importlib.import_module(f"datapipe.sources.{name}")
for name in FORMATS:
    shard_format(name)
for name in ("h5py", "crc32c"):
    importlib.import_module(name)


def pack(job: Job) -> None:
    if job.variant == "command":
        command = [sys.executable, "-m", "datapipe", "pack", job.source, job.out]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return
    recode = RecodeOptions(resize=f"short={SHORT}", quality=QUALITY, restart=RESTART) if job.resize else RecodeOptions()
    options = PackOptions(format=job.variant, workers=job.workers or None, recode=recode)
    pack_data_set(Path(job.source), Path(job.out), options)


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    with DataSet(Path(job.out) / "train") as data_set:
        for sample, label in enumerate(data_set.index["label"].tolist()):
            yield data_set.read(sample), label
