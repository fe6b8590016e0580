"""How fast does the loader read samples, for a decoder on another device, and how soon does it begin?

    python -m benchmarks.bench_reading [--count 6000] [--rounds 7] [--samples 1281167]

Tar, HDF5 and LMDB shards of photographs, read, compared with their checksums and cut to windows by one thread (in the
order "blocks" two more read ahead): in the order "full" from the page cache, and in the order "blocks" from the page
cache and past it, beside a plain loop that reads the same shards in blocks of 8 MiB into one buffer. A loader's second
epoch counts. Then the first batch of a data set with an index of ImageNet's length, in a process of its own. Writes
results/reading.json.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import corpus
from benchmarks.measure import WORK, command_line, compare, environment, process, shown, summarise, table, write_record
from datapipe.dataset import DataSet
from datapipe.dataset.index import open_index, write_index
from datapipe.dataset.manifest import INDEX, KEYS, FileInfo, Manifest
from datapipe.fsio import checksum
from datapipe.loaders.base import DataDescription
from datapipe.loaders.cpu import make_source
from datapipe.loaders.engine import Delivery, Engine
from datapipe.loaders.options import LoaderOptions
from datapipe.loaders.window_cutter import EncodedImages, WindowCutter
from datapipe.sampling.augment import Augment

BATCH, BLOCK_BYTES = 256, 8 << 20
FORMATS = ("tar", "hdf5", "lmdb")
FIRST_BATCH = """
import sys, time
import numpy, torch
from datapipe.loaders import open_loader
import datapipe.loaders.cpu
began = time.perf_counter()
with open_loader(sys.argv[1], 256, size=224, seed=int(sys.argv[2])) as loader:
    opened = time.perf_counter()
    next(iter(loader))
    done = time.perf_counter()
shared = private = 0
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        of_index = line.rstrip().endswith("index.npy")
    elif of_index and line.startswith(("Shared_Clean", "Private_Clean")):
        shared += int(line.split()[1])
    elif of_index and line.startswith("Private_Dirty"):
        private += int(line.split()[1])
import json
print(json.dumps({"open_s": opened - began, "first_batch_s": done - began, "index_private_dirty_kib": private}))
"""


class NoDelivery(Delivery[EncodedImages]):
    """Gives the slots themselves, with windows that nothing decodes."""

    def new_slots(self, positions, count) -> EncodedImages:
        return EncodedImages(positions, count, np.zeros(1, np.uint8))

    def put_nothing(self, slots, slot) -> None:
        pass

    def finish(self, slots, engine) -> EncodedImages:
        return slots

    def set_size(self, size) -> None:
        pass

    def drain(self) -> None:
        pass


def ours(folder: Path, order: str, io: str) -> dict[str, float]:
    options = LoaderOptions(
        BATCH,
        order=order,
        threads=1,
        augment=Augment("random_resized"),
        io=io,
        block_mib=BLOCK_BYTES >> 20,
        retries=0,
        timeout_s=600.0,
    )
    data_set = DataSet(folder, io)
    data, source = DataDescription.from_data_set(data_set), make_source(data_set, options)
    loader = Engine(data, options, source, WindowCutter(options), NoDelivery())
    try:
        list(loader)  # an epoch in which memory is touched for the first time
        loader.read_bytes = 0
        cpu_began, began = time.process_time(), time.perf_counter()
        count = sum(BATCH for _ in loader)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        size = loader.read_bytes
    finally:
        loader.close()
    return {"mb_per_s": size / 1e6 / wall_s, "samples_per_s": count / wall_s, "samples_per_cpu_s": count / cpu_s}


def plain(folder: Path, direct: bool) -> dict[str, float]:
    """What `dd bs=8M` does."""
    memory = mmap.mmap(-1, BLOCK_BYTES)
    memory[:] = bytes(BLOCK_BYTES)
    began, done = time.perf_counter(), 0
    for shard in Manifest.read(folder).shards:
        fd = os.open(folder / shard.name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            offset = 0
            while count := os.preadv(fd, [memory], offset):
                offset += count
        finally:
            os.close(fd)
        done += offset
    return {"mb_per_s": done / 1e6 / (time.perf_counter() - began)}


def long_index(folder: Path, count: int) -> Path:
    """A data set whose index names the same samples again and again."""
    target = WORK / f"long-index-{count}"
    if not (target / "manifest.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        manifest = Manifest.read(folder)
        records = np.resize(open_index(folder, manifest), count)
        write_index(target, records)
        (target / KEYS).write_text("".join(f"{i}\n" for i in range(count)))
        for shard in manifest.shards:
            if not (target / shard.name).exists():
                os.link(folder / shard.name, target / shard.name)
        used = np.bincount(records["shard"], minlength=len(manifest.shards)).tolist()
        shards = [shard.model_copy(update={"num_samples": n}) for shard, n in zip(manifest.shards, used, strict=True)]
        files = [
            FileInfo(name=name, size_bytes=(target / name).stat().st_size, xxh3_128=checksum(target / name))
            for name in (INDEX, KEYS)
        ]
        manifest.model_copy(update={"num_samples": count, "shards": shards, "files": files}).write(target)
    return target


def first_batch(folder: Path, number: int) -> dict[str, float]:
    output, figures = process([sys.executable, "-c", FIRST_BATCH, str(folder), str(number)])
    return json.loads(output) | {"process_wall_s": figures["process_wall_s"]}


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=7)
    parser.add_argument("--samples", type=int, default=1_281_167, help="of the long index (default: %(default)s)")
    arguments = parser.parse_args()

    described = environment()
    folder = corpus.packed(corpus.photographs(arguments.count))
    runs = {}
    for name in FORMATS:
        runs[f"{name}, full, cached"] = lambda _, name=name: ours(folder / name / "train", "full", "cached")
        runs[f"{name}, blocks, cached"] = lambda _, name=name: ours(folder / name / "train", "blocks", "cached")
    runs["tar, plain loop, cached"] = lambda _: plain(folder / "tar" / "train", direct=False)
    runs["tar, blocks, direct"] = lambda _: ours(folder / "tar" / "train", "blocks", "direct")
    runs["tar, plain loop, direct"] = lambda _: plain(folder / "tar" / "train", direct=True)
    for name in FORMATS:  # into the page cache
        plain(folder / name / "train", direct=False)
    figures = compare(list(runs), arguments.rounds, lambda name, number: runs[name](number))
    columns = ("mb_per_s", "samples_per_s", "samples_per_cpu_s")
    rows = [[name, *(shown(row[key]) if key in row else "" for key in columns)] for name, row in figures.items()]
    print("\n" + table(["reading", "MB/s", "samples/s", "samples/CPU-s"], rows))

    target = long_index(folder / "tar" / "train", arguments.samples)
    first_batch(target, 0)
    starts = [first_batch(target, number) for number in range(arguments.rounds)]
    start = summarise(starts)
    print(f"\n{arguments.samples:,} samples: loader open after {shown(start['open_s'], 2)} s, "
          f"first batch after {shown(start['first_batch_s'], 2)} s, "
          f"{start['index_private_dirty_kib']['max']:.0f} KiB of the index not shared")  # fmt: skip
    record = {"environment": described, "corpus": corpus.describe(folder), "rounds": arguments.rounds}
    print(write_record("reading", record | {"reading": figures, "start": start | {"samples": arguments.samples}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
