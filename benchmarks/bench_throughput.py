"""How many images/s does a training reach, beside a usual loop, and beside itself without data to load?

    python -m benchmarks.bench_throughput [--rounds 5] [--only resnet8 resnet50] [--images 30000 640]

ResNet-8 on Fashion-MNIST, 28 pixels, and ResNet-50 on photographs, 96 pixels: `trainer train` with loading, `trainer
train` on random images of the input's size that are in memory when the steps begin, and a loop as in torchvision's
reference scripts (reference_training.py), all with the same torch, precision, threads and batch. Every run is a process
of its own; the runs alternate. Ratios are of the runs of a round. Writes results/throughput.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import corpus
from benchmarks.measure import (
    WORK,
    command_line,
    environment,
    interleaved,
    process,
    shown,
    spread,
    summarise,
    table,
    write_record,
)
from datapipe.packing import PackOptions, pack

GOALS = {"reference loop": 1.15, "trainer, images in memory": 0.97}  # of the trainer's images/s over theirs
OURS = "trainer"
WAYS = (OURS, *GOALS)
FIGURES = ("images_per_s", "process_cpu_s")
VAL_IMAGES = 64


@dataclass(frozen=True)
class Case:
    """A recipe, and what is changed in it to train here."""

    recipe: str
    changes: tuple[str, ...]
    size: int
    channels: int
    images: int  # to train on, as many for each way

    def folder(self, images: int) -> Path:
        """The corpus, with `images/` and `tar/`."""
        if self.channels == 1:
            return corpus.fashion_mnist(images)
        folder = corpus.photographs(images, VAL_IMAGES)
        corpus.packed_as(folder, "tar", PackOptions(format="tar", shard_mib=64))
        return folder


COMMON = ("train.epochs=1", "train.target_accuracy=none", "data.threads=2")
LARGE = ("data.size=96", "train.batch_size=64", 'schedule={name="constant"}', "train.checkpoint_every_steps=none")
CASES = {
    "resnet8": Case("fashion-mnist-resnet8", COMMON, 28, 1, 60_000),
    "resnet50": Case("imagenet-resnet50", (*COMMON, *LARGE), 96, 3, 1280),
}


def noise(images: int, size: int, channels: int) -> Path:
    """Folder with random images of one size, packed, of 10 classes."""
    folder = WORK / f"noise-{images}-{size}-{channels}"
    if not folder.exists():
        source, random = WORK / "noise.tmp", np.random.default_rng(0)
        shutil.rmtree(source, ignore_errors=True)
        for split, count in (("train", images), ("val", VAL_IMAGES)):
            for number in range(count):
                path = source / split / str(number % 10) / f"{number:06}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = random.integers(256, size=(size, size, channels), dtype=np.uint8)
                Image.fromarray(pixels.squeeze()).save(path, compress_level=0)
        pack(source, folder, PackOptions(format="tar"))
        shutil.rmtree(source)
    return folder


def train(recipe: str, data: Path, changes: tuple[str, ...]) -> dict:
    """What `trainer train` says of a run in a fresh folder."""
    out = WORK / "runs" / "throughput"
    shutil.rmtree(out, ignore_errors=True)
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "trainer", "train", recipe, "--data", str(data), "--out", str(out), *words]
    _, took = process(command)
    end = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return {**{key: end[key] for key in ("images_per_s", "wait_share", "time_s")}, **took}


def run(case: Case, images: int, way: str, number: int) -> dict:
    changes = (*case.changes, f"train.seed={number}")
    if way == OURS:
        return train(case.recipe, case.folder(images) / "tar", changes)
    if way == "reference loop":
        folder = case.folder(images) / "images" / "train"
        command = [sys.executable, "-m", "benchmarks.reference_training", str(folder), case.recipe, *changes]
        output, took = process(command)
        return json.loads(output.splitlines()[-1]) | took
    still = ("data.backend=resident", "data.crop=none", "data.flip=false")
    return train(case.recipe, noise(images, case.size, case.channels), (*changes, *still))


def ratios(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Return the trainer's images/s over the other ways', by round, and whether the median meets the goal."""
    by_way = {}
    for way, goal in GOALS.items():
        pairs = zip(runs[OURS], runs[way], strict=True)
        by_way[way] = spread(ours["images_per_s"] / other["images_per_s"] for ours, other in pairs)
        by_way[way] |= {"goal": goal, "met": by_way[way]["median"] >= goal}
    return by_way


def report(cases: dict[str, dict]) -> str:
    header = ["", "images/s", "CPU s", "trainer's over it", "goal"]
    rows = []
    for name, case in cases.items():
        for way, its in case["ways"].items():
            ratio = case["ratios"].get(way)
            cells = (
                [shown(ratio, 2), f"≥ {ratio['goal']:g}: {'met' if ratio['met'] else 'missed'}"] if ratio else ["", ""]
            )
            rows.append([f"{name}, {way}", shown(its["images_per_s"]), shown(its["process_cpu_s"]), *cells])
    return table(header, rows)


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES], metavar="CASE", help="(default: all)")
    parser.add_argument("--images", type=int, nargs="+", metavar="N", help="to train on, for each case")
    arguments = parser.parse_args()
    counts = arguments.images or [CASES[name].images for name in arguments.only]
    record: dict = {"environment": environment(), "rounds": arguments.rounds, "cases": {}}
    for name, images in zip(arguments.only, counts, strict=True):
        case = CASES[name]
        runs = interleaved(WAYS, arguments.rounds, lambda way, number: run(case, images, way, number))  # noqa: B023
        ways = {way: summarise(its, FIGURES) for way, its in runs.items()}
        record["cases"][name] = {"images": images, "changes": case.changes, "ways": ways, "ratios": ratios(runs)}
    print(report(record["cases"]) + "\n\nMedians (smallest–largest) over the rounds.")
    print(write_record("throughput", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
