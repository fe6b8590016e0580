"""What takes how long at ImageNet's count: 1,281,167 images to train on, and 50,000 to validate?

    python -m benchmarks.bench_imagenet [--count 1281167] [--val-count 50000] [--classes 1000] [--out FOLDER]

The files of a split are hard links to a thousand small JPEGs, in a thousand class folders, so that there is little to
read and to decode: what is measured grows with their number. Each step is a process of its own, and runs once:
planning, packing, verifying and staging of ours, packing of others, and each loader's first batch and epoch. Writes
results/imagenet.json if the counts are ImageNet's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.bench_loader import Child
from benchmarks.measure import WORK, command_line, environment, process, table, timed, write_record
from benchmarks.peers import PEERS, Task
from benchmarks.peers.packing import Packer, command, missing, versions
from datapipe.fsio import mounted_as

IMAGENET = {"train": 1_281_167, "val": 50_000}  # of ILSVRC2012
SIDE, POOL = 32, 1000  # pixels; different images of a split, as one file can have only so many names
TASK = Task(size=SIDE, channels=3, crop="random_resized")
PLAN = """
import sys
from pathlib import Path
from datapipe.packing import PackOptions
from datapipe.packing.plan import make_plan
from datapipe.sources import open_source
make_plan(open_source(Path(sys.argv[1])), PackOptions(shard_mib=256).settings())
"""
OURS = {  # the command of each step
    "list and plan": lambda folder: [sys.executable, "-c", PLAN, folder / "images"],
    "datapipe pack": lambda folder: datapipe("pack", folder / "images", folder / "tar"),
    "datapipe verify": lambda folder: datapipe("verify", folder / "tar"),
    "datapipe stage": lambda folder: datapipe("stage", folder / "tar", folder / "staged"),
}
PACKERS = {  # into which folder of the corpus each packs the training images
    "WebDataset": ("shardwriter", Packer("pack_webdataset", "webdataset", workers=1)),
    "LitData": ("litdata", Packer("pack_litdata", "litdata")),
    "FFCV": ("ffcv-jpg", Packer("ffcv_loader", "ffcv")),
}
LOADERS = ("datapipe, tar", "FFCV, jpg", "WebDataset + Pillow", "LitData + Pillow")


def datapipe(*words: object) -> list[object]:
    return [sys.executable, "-m", "datapipe", *words]


def link_images(folder: Path, counts: dict[str, int], classes: int) -> float:
    """Make folder/images/SPLIT/CLASS/*.JPEG, links to small files; return the mean bytes of these."""
    noise = np.random.default_rng(0)
    total_bytes = 0
    for split, count in counts.items():
        images = [folder / "pool" / split / f"{i}.jpg" for i in range(POOL)]
        images[0].parent.mkdir(parents=True)
        for path in images:
            patches = Image.fromarray(noise.integers(256, size=(4, 4, 3), dtype=np.uint8))
            patches.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
            total_bytes += path.stat().st_size
        for label in range(classes):
            directory = folder / "images" / split / f"n{label:08}"
            directory.mkdir(parents=True)
            for number in range(label, count, classes):
                os.link(images[number % POOL], directory / f"n{label:08}_{number}.JPEG")
    return total_bytes / (len(counts) * POOL)


def run_ours(folder: Path) -> dict[str, dict]:
    steps = {}
    for name, words in OURS.items():
        _, steps[name] = process(list(map(str, words(folder))))
        print(f"  {name}: {steps[name]['process_wall_s']:.1f} s", flush=True)
    return steps


def run_packers(folder: Path) -> dict[str, dict]:
    steps = {}
    for name, (data, packer) in PACKERS.items():
        if reason := missing(packer):
            print(f"  without {name}: {reason}", flush=True)
            continue
        out = folder / data / "train"
        out.mkdir(parents=True)
        job = packer.job(folder / "images" / "train", out, resize=False)
        answer, whole = process(command(packer, "pack", json.dumps(asdict(job))))
        steps[name] = {**json.loads(answer), **whole}
        print(f"  {name}: {steps[name]['process_wall_s']:.1f} s", flush=True)
    return steps


def run_loaders(folder: Path) -> dict[str, dict]:
    """Go through an epoch with each, and return how soon its first batch came, and images per CPU second after it."""
    loaders = {}
    for name in LOADERS:
        if missing(PEERS[name]) or not (folder / PEERS[name].data / "train").exists():
            continue
        with Child(name, folder, TASK) as child:
            run = child.epoch(0)
        after = {f"{kind}_s": run[f"{kind}_s"] - run[f"first_{kind}_s"] for kind in ("wall", "cpu")}
        images = run["images"] - TASK.batch_size
        loaders[name] = run | {
            "begin_s": run["open_s"] + run["first_wall_s"],
            "images_per_s": images / after["wall_s"],
            "images_per_cpu_s": images / after["cpu_s"],
        }
        print(f"  {name}: {run['wall_s']:.1f} s, the first batch after {loaders[name]['begin_s']:.2f} s", flush=True)
    return loaders


def report(record: dict) -> str:
    steps = {**record["ours"], **{f"{name} packs": its for name, its in record["packers"].items()}}
    rows = [
        [name, *(f"{its[key]:,.1f}" for key in ("process_wall_s", "process_cpu_s")),
         f"{its['process_peak_bytes'] / 2**20:,.0f}"]
        for name, its in steps.items()
    ]  # fmt: skip
    text = table([f"{sum(record['images'].values()):,} images", "wall s", "CPU s", "peak MiB"], rows)
    keys = {"open_s": ".2f", "begin_s": ".2f", "wall_s": ",.1f", "images_per_s": ",.0f", "images_per_cpu_s": ",.0f"}
    rows = [[name, *(format(its[key], form) for key, form in keys.items())] for name, its in record["loaders"].items()]
    return f"{text}\n\n" + table(["loading", "open s", "first batch s", "epoch s", "images/s", "images/CPU-s"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, count=IMAGENET["train"])
    parser.add_argument("--val-count", type=int, default=IMAGENET["val"], help="of them (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=1000, help="class folders (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=WORK, help="folder to work in (default: %(default)s)")
    options = parser.parse_args(arguments)

    described = environment()
    counts = {"train": options.count, "val": options.val_count}
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="imagenet-", dir=options.out))
        stack.callback(shutil.rmtree, folder)
        print(f"linking {sum(counts.values()):,} files in {options.out} ({mounted_as(options.out)})", flush=True)
        with timed() as linking:
            image_bytes = link_images(folder, counts, options.classes)
        record = {
            "environment": described,
            "peers": versions(),
            "images": counts,
            "classes": options.classes,
            "image_bytes": image_bytes,
            "filesystem": mounted_as(options.out),
            "linking": linking,
            "ours": run_ours(folder),
            "packers": run_packers(folder),
            "loaders": run_loaders(folder),
        }
    print(f"\n{report(record)}\n")
    print("Each once. Peaks are of the largest process. The last two columns are of an epoch after its first batch.")
    if counts == IMAGENET:
        print(write_record("imagenet", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
