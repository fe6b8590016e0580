"""MosaicML Streaming's MDSWriter, without compression and hashes, which are off by default.

The column's encoding is `bytes`: the files' bytes as they are. (`jpeg` takes opened Pillow images; from one that was
opened by its name it stores the file's bytes, too, at the price of opening it twice.) With more processes, each
writes a folder of its own, and `merge_index` makes them one data set, as its documentation says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing import Pool

import torch

from benchmarks.peers.packing import Job, labelled_files

# torchvision's wheel on PyPI is built for CUDA. Beside a torch without CUDA its compiled operators do not load, and its
# import then fails over the two that it describes in Python. Declaring them is enough: nothing here calls them.
OPERATORS = ("nms", "qnms")
try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in OPERATORS:
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import LocalDataset, MDSWriter  # noqa: E402
from streaming.base.util import merge_index  # noqa: E402

COLUMNS = {"image": "bytes", "label": "int"}


def pack(job: Job) -> None:
    files = labelled_files(job.source)
    if job.workers == 1:
        _write(job.out, files)
        return
    with Pool(job.workers) as pool:
        pool.starmap(_write, [(f"{job.out}/{i}", files[i :: job.workers]) for i in range(job.workers)])
    merge_index(job.out)


def _write(out: str, files: list[tuple[str, int]]) -> None:
    with MDSWriter(out=out, columns=COLUMNS) as writer:
        for path, label in files:
            with open(path, "rb") as file:
                writer.write({"image": file.read(), "label": label})


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    data_set = LocalDataset(job.out)
    return ((sample["image"], sample["label"]) for sample in map(data_set.get_item, range(len(data_set))))
