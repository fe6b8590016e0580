"""WebDataset's ShardWriter, given the files' bytes.

It writes in one process; with more, each has a ShardWriter and shards of its own, as its users do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

import webdataset

from benchmarks.peers.packing import Job, labelled_files


def pack(job: Job) -> None:
    files = list(enumerate(labelled_files(job.source)))
    if job.workers == 1:
        _write(job.out, 0, files)
        return
    with Pool(job.workers) as pool:
        pool.starmap(_write, [(job.out, i, files[i :: job.workers]) for i in range(job.workers)])


def _write(out: str, worker: int, files: list[tuple[int, tuple[str, int]]]) -> None:
    with webdataset.ShardWriter(f"{out}/shard-{worker}-%06d.tar", verbose=0) as writer:
        for number, (path, label) in files:
            with open(path, "rb") as file:
                writer.write({"__key__": f"{number:08}", "jpg": file.read(), "cls": label})


def read(job: Job) -> Iterator[tuple[bytes, int]]:
    shards = sorted(map(str, Path(job.out).glob("*.tar")))
    samples = webdataset.WebDataset(shards, shardshuffle=False).to_tuple("jpg", "cls")
    return ((data, int(label)) for data, label in samples)
