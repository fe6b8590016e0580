"""How many training images a second does each loader give, for a wall second and for a CPU second?

    python -m benchmarks.bench_loader [--count 6000] [--rounds 7] [--only SECTION [NAME …]]

Photographs as from ImageNet, the same as pixels of 256×256, and Fashion-MNIST's 28×28 pixels. Every loader runs in a
process of its own, with two workers or threads; their epochs alternate. Prints tables, writes results/loader.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks import corpus, measure
from benchmarks.measure import command_line, compare, environment, shown, table, write_record
from benchmarks.peers import EVERYWHERE, PEERS, Task
from benchmarks.peers.packing import PEERS_VENV, missing
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions

OURS = "datapipe"
PHOTOGRAPHS = Task(size=224, channels=3, crop="random_resized")
SECTIONS: dict[str, tuple[Task, list[str]]] = {
    "photographs": (
        PHOTOGRAPHS,
        ["datapipe, tar --restart 8", "datapipe, tar", "datapipe, dali --restart 8", "datapipe, dali", "FFCV, jpg",
         "FFCV, smart", "FFCV, raw", "DALI, tar", "SPDL", "WebDataset + Pillow", "ImageFolder + Pillow",
         "MosaicML Streaming + Pillow", "LitData + Pillow"],
    ),
    "pixels": (PHOTOGRAPHS, ["datapipe, pixels of 256", "FFCV, raw of 256"]),
    "fashion-mnist": (Task(size=28, channels=1, crop="pad", pad=2), list(EVERYWHERE)),
}  # fmt: skip


class Child(measure.Child):
    """A peer in its own process, idle until it is asked for an epoch."""

    def __init__(self, name: str, folder: Path, task: Task) -> None:
        python = str(PEERS_VENV / "bin" / "python") if PEERS[name].needs else sys.executable
        super().__init__(name, [python, "-m", "benchmarks.peers", name, str(folder), json.dumps(asdict(task))])
        self.last = None

    def epoch(self, number: int) -> dict:
        run = self.ask(number)
        self.last = run.pop("last")  # what the test looks at
        return run | {"images_per_s": run["images"] / run["wall_s"], "images_per_cpu_s": run["images"] / run["cpu_s"]}


def section(folder: Path, task: Task, names: list[str], rounds: int) -> dict:
    """Measure all on one corpus: settings, corpus, every run's figures, and their spread."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(Child(name, folder, task)) for name in names}
        for child in children.values():
            child.epoch(0)  # warm-up: starts the workers, fills the page cache
        keys = ("images_per_s", "images_per_cpu_s")
        figures = compare(names, rounds, lambda name, number: children[name].epoch(number + 1), keys)
    return {"settings": asdict(task), "corpus": corpus.describe(folder), "rounds": rounds, "loaders": figures}


def report(name: str, result: dict) -> str:
    loaders = result["loaders"]
    peers = [peer for peer in loaders if not peer.startswith(OURS)]
    rows = []
    for loader, figures in loaders.items():
        per_cpu_s = figures["images_per_cpu_s"]
        ratios = (per_cpu_s["median"] / loaders[peer]["images_per_cpu_s"]["median"] for peer in peers)
        rows.append([loader, shown(figures["images_per_s"]), shown(per_cpu_s), *(f"{ratio:.2f}" for ratio in ratios)])
    header = [name, "images/s", "images/CPU-s", *(f"÷ {peer}" for peer in peers)]
    return table(header, rows)


def with_our_packs(folder: Path) -> Path:
    """The same corpus, with all that this project packs of it; the peers make their own when they first need it."""
    corpus.packed(folder)
    corpus.packed_as(folder, "restart8", PackOptions(recode=RecodeOptions(restart=8)))
    corpus.packed_as(folder, "raw256", PackOptions(format="npy", recode=RecodeOptions(store="raw", size=256)))
    return folder


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=7)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="a section, and some of its loaders; no record")
    arguments = parser.parse_args()
    only, *names = arguments.only or [None]
    if only not in (None, *SECTIONS):
        parser.error(f"--only: {only} is not one of {', '.join(SECTIONS)}")

    described = environment()
    sections = {}
    for section_name, (task, all_names) in SECTIONS.items():
        if only not in (None, section_name):
            continue
        if section_name == "fashion-mnist":
            folder = corpus.fashion_mnist()
        else:
            folder = with_our_packs(corpus.photographs(arguments.count))
        absent = {name: reason for name in all_names if (reason := missing(PEERS[name]))}
        for name, reason in absent.items():
            print(f"without {name}: {reason}")
        taking_part = [name for name in all_names if name not in absent and (not names or name in names)]
        print(f"{section_name}: 1 warm-up and {arguments.rounds} measured epochs of each loader", flush=True)
        sections[section_name] = section(folder, task, taking_part, arguments.rounds) | {"absent": absent}
        print("\n" + report(section_name, sections[section_name]) + "\n", flush=True)
    print("Medians (smallest–largest) over the epochs; ratios are of images per CPU-second.")
    if not only:
        print(write_record("loader", {"environment": described, "sections": sections}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
