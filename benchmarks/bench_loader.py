"""How many training images a second does each loader give, for a wall second and for a CPU second?

    python -m benchmarks.bench_loader [--count 6000] [--rounds 7] [--only SECTION [NAME …]]

Photographs as from ImageNet, for training, for validation and in other JPEG qualities; the same as pixels of 256×256;
and small images. Every loader runs in a process of its own, with two workers or threads; their epochs alternate.
Prints tables, writes results/loader.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import corpus, measure
from benchmarks.measure import command_line, compare, environment, shown, spread, table, write_record
from benchmarks.peers import EVERYWHERE, PEERS, Task
from benchmarks.peers.packing import missing, python_with, versions
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions

OURS = "datapipe"
PHOTOGRAPHS = Task(size=224, channels=3, crop="random_resized")
CENTRES = Task(size=224, channels=3, crop="centre", flip=False, train=False, split="train")
SMALL = 50_000  # images of 32×32 pixels
PACKS = {
    "restart8": PackOptions(recode=RecodeOptions(restart=8)),
    "raw256": PackOptions(format="npy", recode=RecodeOptions(store="raw", size=256)),
    "raw32": PackOptions(format="npy", recode=RecodeOptions(store="raw", size=32)),
}


def with_our_packs(folder: Path, names: Set[str]) -> Path:
    """The same corpus, with those of the named folders that this project packs. The peers make theirs when they first
    need it."""
    if names & {"tar", "hdf5", "lmdb"}:
        corpus.packed(folder)
    for name in names & PACKS.keys():
        corpus.packed_as(folder, name, PACKS[name])
    return folder


@dataclass(frozen=True)
class Section:
    """`loaders` are compared in what `task` asks, on the images that `make_corpus` makes, given how many photographs.

    `ratio`: two of them, of whose images per wall second the quotient is wanted, epoch by epoch.
    """

    task: Task
    loaders: list[str]
    make_corpus: Callable[[int], Path]
    ratio: tuple[str, str] | None = None

    def prepare(self, count: int) -> Path:
        """Make the corpus, of `count` photographs, and return its folder."""
        return with_our_packs(self.make_corpus(count), {PEERS[name].data for name in self.loaders})


QUALITY = ["datapipe, tar --restart 8", "datapipe, tar", "FFCV, jpg"]
THREADS = ("datapipe, tar", "datapipe, tar, 1 thread")
SECTIONS = {
    "photographs": Section(
        PHOTOGRAPHS,
        ["datapipe, tar --restart 8", "datapipe, tar", "datapipe, dali --restart 8", "datapipe, dali", "FFCV, jpg",
         "FFCV, smart", "FFCV, raw", "DALI, tar", "SPDL", "SPDL, processes", "torchcodec", "Grain + OpenCV",
         "WebDataset + Pillow", "ImageFolder + Pillow", "MosaicML Streaming + Pillow", "LitData + Pillow"],
        corpus.photographs,
    ),
    "validation": Section(CENTRES, ["datapipe, tar", "FFCV, jpg", "SPDL", "ImageFolder + Pillow"], corpus.photographs),
    "quality-90": Section(PHOTOGRAPHS, QUALITY, partial(corpus.photographs, quality=90)),
    "quality-97": Section(PHOTOGRAPHS, QUALITY, partial(corpus.photographs, quality=97)),
    "threads": Section(PHOTOGRAPHS, list(THREADS), corpus.photographs, THREADS),
    "pixels": Section(PHOTOGRAPHS, ["datapipe, pixels of 256", "FFCV, raw of 256"], corpus.photographs),
    "pixels-of-32": Section(
        Task(size=32, channels=3, crop="pad", pad=4),
        ["datapipe, pixels of 32"],
        lambda _count: corpus.small_pixels(SMALL, 32),
    ),
    "fashion-mnist": Section(
        Task(size=28, channels=1, crop="pad", pad=2), list(EVERYWHERE), lambda _count: corpus.fashion_mnist()
    ),
}  # fmt: skip


class Child(measure.Child):
    """A peer in its own process, idle until it is asked for an epoch."""

    def __init__(self, name: str, folder: Path, task: Task) -> None:
        python, asked = python_with(PEERS[name].needs), json.dumps(asdict(task))
        super().__init__(name, [python, "-m", "benchmarks.peers", name, str(folder), asked])
        self.last = self.decoder = None

    def epoch(self, number: int) -> dict:
        run = self.ask(number)
        self.last, self.decoder = run.pop("last"), run.pop("decoder")  # what the test and the record look at
        return run | {"images_per_s": run["images"] / run["wall_s"], "images_per_cpu_s": run["images"] / run["cpu_s"]}


def measure_all(folder: Path, task: Task, names: list[str], rounds: int) -> dict:
    """Measure all on one corpus: settings, corpus, every run's figures, and their spread; of ours, the decoders."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(Child(name, folder, task)) for name in names}
        for child in children.values():
            child.epoch(0)  # warm-up: starts the workers, fills the page cache
        keys = ("images_per_s", "images_per_cpu_s")
        figures = compare(names, rounds, lambda name, number: children[name].epoch(number + 1), keys)
        for name, child in children.items():
            figures[name] |= {"decoder": child.decoder} if child.decoder else {}
    return {"settings": asdict(task), "corpus": corpus.describe(folder), "rounds": rounds, "loaders": figures}


def wall_ratio(loaders: dict, ratio: tuple[str, str]) -> dict:
    """The spread of one loader's images per wall second over another's in the epoch beside it."""
    over, under = ([run["images_per_s"] for run in loaders[name]["runs"]] for name in ratio)
    return {"of": list(ratio), **spread(a / b for a, b in zip(over, under, strict=True))}


def report(name: str, result: dict) -> str:
    loaders = result["loaders"]
    peers = [peer for peer in loaders if not peer.startswith(OURS)]
    rows = []
    for loader, figures in loaders.items():
        per_cpu_s = figures["images_per_cpu_s"]
        ratios = (per_cpu_s["median"] / loaders[peer]["images_per_cpu_s"]["median"] for peer in peers)
        rows.append([loader, shown(figures["images_per_s"]), shown(per_cpu_s), *(f"{ratio:.2f}" for ratio in ratios)])
    header = [name, "images/s", "images/CPU-s", *(f"÷ {peer}" for peer in peers)]
    lines = [table(header, rows)]
    lines += [f"{loader} decodes {its['decoder']}" for loader, its in loaders.items() if "decoder" in its]
    if ratio := result.get("wall_ratio"):
        lines.append(f"images/s of {' ÷ '.join(ratio['of'])}: {shown(ratio, 2)}")
    return "\n".join(lines)


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=7)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="a section, and some of its loaders; no record")
    arguments = parser.parse_args()
    only, *names = arguments.only or [None]
    if only not in (None, *SECTIONS):
        parser.error(f"--only: {only} is not one of {', '.join(SECTIONS)}")

    described = environment()
    sections = {}
    for section_name, section in SECTIONS.items():
        if only not in (None, section_name):
            continue
        absent = {name: reason for name in section.loaders if (reason := missing(PEERS[name]))}
        for name, reason in absent.items():
            print(f"without {name}: {reason}")
        taking_part = [name for name in section.loaders if name not in absent and (not names or name in names)]
        folder = section.prepare(arguments.count)
        print(f"{section_name}: 1 warm-up and {arguments.rounds} measured epochs of each loader", flush=True)
        result = measure_all(folder, section.task, taking_part, arguments.rounds) | {"absent": absent}
        if section.ratio and {*section.ratio} <= {*taking_part}:
            result["wall_ratio"] = wall_ratio(result["loaders"], section.ratio)
        sections[section_name] = result
        print("\n" + report(section_name, sections[section_name]) + "\n", flush=True)
    print("Medians (smallest–largest) over the epochs; ratios are of images per CPU-second.")
    if not only:
        print(write_record("loader", {"environment": described, "peers": versions(), "sections": sections}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
