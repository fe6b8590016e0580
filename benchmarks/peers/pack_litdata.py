"""LitData's `optimize`.

An image is given as bytes, which it stores as they are. (Its `Jpeg` type re-encodes images of quality above 95 unless
told not to, and for bytes does the same work otherwise.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # a request to PyPI for each `optimize`

import litdata

from benchmarks.peers.pack_pillow import shrunk
from benchmarks.peers.packing import Job, labelled_files


def pack(job: Job) -> None:
    litdata.optimize(
        partial(_sample, variant=job.variant if job.resize else ""),
        labelled_files(job.source),
        job.out,
        chunk_bytes="64MB",
        num_workers=job.workers,
        reorder_files=False,  # else it asks for every file's size first
        start_method="fork",  # its own default starts another Python and imports torch in every worker
        verbose=False,
    )


def _sample(labelled_file: tuple[str, int], variant: str) -> dict:
    path, label = labelled_file
    if variant:
        return {"image": shrunk(path, variant), "label": label}
    with open(path, "rb") as file:
        return {"image": file.read(), "label": label}


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    data_set = litdata.StreamingDataset(job.out)
    return ((sample["image"], sample["label"]) for sample in map(data_set.__getitem__, range(len(data_set))))
