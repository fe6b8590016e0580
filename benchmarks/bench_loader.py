"""How many training images a second does each loader give, for a wall second and for a CPU second?

    python -m benchmarks.bench_loader [--count 6000] [--rounds 7]

Photographs as from ImageNet, and Fashion-MNIST's 28×28 pixels. Every loader runs in a process of its own,
with two workers or threads; their epochs alternate. Prints tables, writes results/loader.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import ROOT, column, environment, interleaved, shown, table, write_record
from benchmarks.peers import PEERS, Task

OURS = "datapipe"
TASKS = {
    "photographs": Task(size=224, channels=3, crop="random_resized"),
    "fashion-mnist": Task(size=28, channels=1, crop="pad", pad=2),
}


class Child:
    """A peer in its own process, idle until it is asked for an epoch."""

    def __init__(self, name: str, folder: Path, task: Task) -> None:
        command = [sys.executable, "-m", "benchmarks.peers", name, str(folder), json.dumps(asdict(task))]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.name = name

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_exc) -> None:
        self._process.stdin.close()
        self._process.wait()

    def epoch(self, number: int) -> dict:
        self._process.stdin.write(f"{number}\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"error: {self.name} ended with exit code {self._process.wait()}")
        run = json.loads(answer)
        return run | {"images_per_s": run["images"] / run["wall_s"], "images_per_cpu_s": run["images"] / run["cpu_s"]}


def section(folder: Path, task: Task, names: list[str], rounds: int) -> dict:
    """Measure all on one corpus: settings, corpus, every run's figures, and their spread."""
    with ExitStack() as stack:
        children = {name: stack.enter_context(Child(name, folder, task)) for name in names}
        for child in children.values():
            child.epoch(0)  # warm-up: starts the workers, fills the page cache
        runs = interleaved(names, rounds, lambda name, number: children[name].epoch(number + 1))
    figures = {
        name: {
            "images_per_s": column(runs[name], "images_per_s"),
            "images_per_cpu_s": column(runs[name], "images_per_cpu_s"),
            "runs": runs[name],
        }
        for name in names
    }
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=6000, help="photographs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured epochs of each (default: %(default)s)")
    parser.add_argument("--only", choices=TASKS, help="one section; nothing is written")
    arguments = parser.parse_args()

    described = environment()  # before the runs: the code on disk may change under them
    sections = {}
    for name in [arguments.only] if arguments.only else TASKS:
        photographs = name == "photographs"
        folder = corpus.packed(corpus.photographs(arguments.count)) if photographs else corpus.fashion_mnist()
        print(f"{name}: 1 warm-up and {arguments.rounds} measured epochs of each loader", flush=True)
        sections[name] = section(folder, TASKS[name], list(PEERS), arguments.rounds)
        print("\n" + report(name, sections[name]) + "\n", flush=True)
    print("Medians (smallest–largest) over the epochs; ratios are of images per CPU-second.")
    if not arguments.only:
        print(write_record("loader", {"environment": described, "sections": sections}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
