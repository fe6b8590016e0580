"""This project's `datapipe pack`, with its checksums, index, and synced files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.packing import QUALITY, RESTART, SHORT, Job
from datapipe.dataset import DataSet
from datapipe.packing import PackOptions
from datapipe.packing import pack as pack_data_set
from datapipe.recode import RecodeOptions


def pack(job: Job) -> None:
    recode = RecodeOptions(resize=f"short={SHORT}", quality=QUALITY, restart=RESTART) if job.resize else RecodeOptions()
    options = PackOptions(format=job.variant, workers=job.workers or None, recode=recode)
    pack_data_set(Path(job.source), Path(job.out), options)


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    with DataSet(Path(job.out) / "train") as data_set:
        for sample, label in enumerate(data_set.index["label"].tolist()):
            yield data_set.read(sample), label
