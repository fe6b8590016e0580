"""How fast does `trainer` train with its loader: beside the same with data in memory, and beside torchvision's loop?

    python -m benchmarks.bench_train [--rounds 7] [--only resnet8] [--threads 2]

ResNet-8 on Fashion-MNIST at 28 pixels, as the recipe says, and ResNet-50 on photographs at 96 pixels. Five trainings,
in processes of their own, train an epoch each in turns: this project's, with its loader and with batches that are in
memory; a loop as torchvision's reference training has it, as it is, with channels last in memory, and the latter with
batches in memory, which is what the network alone takes. The same network, optimizer, batch, precision and number of
threads. An epoch of the first evaluates, too. Prints tables, writes results/train.json.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import corpus
from benchmarks.measure import Child, command_line, compare, environment, shown, spread, table, write_record
from benchmarks.train_epochs import KINDS, LAST, LAST_IN_MEMORY, OURS, OURS_IN_MEMORY, REFERENCE
from datapipe.packing import PackOptions

FASHION_IMAGES, PHOTOGRAPHS, VAL_PHOTOGRAPHS, CLASSES = 12_000, 1280, 64, 1000
RATES = ("images_per_s", "images_per_cpu_s")
# Which is divided by which, and what is aimed at.
RATIOS = {
    "trainer ÷ data in memory": (OURS, OURS_IN_MEMORY, 0.97),
    "trainer ÷ reference": (OURS, REFERENCE, 1.15),
    "trainer ÷ reference, channels last": (OURS, LAST, None),
    "trainer ÷ network alone": (OURS, LAST_IN_MEMORY, None),
}
# Images for training and for validation of the whole data sets, by which an evaluation's share of an epoch is told.
WHOLE = {"resnet8": (60_000, 10_000), "resnet50": (1_281_167, 50_000)}


def trainings() -> dict[str, tuple[Path, str, list[str]]]:
    """What trains: the corpus, the recipe, and what is changed in it."""
    photographs = corpus.photographs(PHOTOGRAPHS, VAL_PHOTOGRAPHS)
    corpus.packed_as(photographs, "tar", PackOptions(shard_mib=16))
    small = ["data.size=96", "train.batch_size=32", f"model.num_classes={CLASSES}"]
    return {
        "resnet8": (corpus.fashion_mnist(FASHION_IMAGES), "fashion-mnist-resnet8", []),
        "resnet50": (photographs, "imagenet-resnet50", small),
    }


def measure(name: str, rounds: int, threads: int, training: tuple[Path, str, list[str]]) -> dict:
    """All kinds in turns, after an epoch of each that does not count."""
    folder, recipe, changes = training
    changes = [*changes, "train.log_every=50", f"data.threads={threads}"]
    with ExitStack() as stack:
        children = {}
        for kind in KINDS:
            words = ["-m", "benchmarks.train_epochs", kind, str(folder), recipe, str(threads), *changes]
            children[kind] = stack.enter_context(Child(kind, [sys.executable, *words]))
            children[kind].ask(0)

        def run(kind: str, number: int) -> dict:
            answer = children[kind].ask(number + 1)
            figures = rates(answer)
            if kind == OURS:
                per_image = {key: 1 / rate for key, rate in rates(children[kind].ask("evaluate")).items()}
                train_count, val_count = WHOLE[name]
                for key, seconds in per_image.items():
                    share = seconds * val_count * figures[key] / train_count
                    figures[f"evaluation_share, {key}"] = share
            return figures

        compared = compare(KINDS, rounds, run)
    ratios = {
        what: {key: ratio(compared, mine, others, key) for key in RATES} | {"goal": goal}
        for what, (mine, others, goal) in RATIOS.items()
    }
    return {
        "corpus": corpus.describe(folder),
        "recipe": recipe,
        "changes": changes,
        "kinds": compared,
        "ratios": ratios,
    }


def rates(answer: dict) -> dict[str, float]:
    return {key: answer["images"] / answer[unit] for key, unit in zip(RATES, ("wall_s", "cpu_s"), strict=True)}


def ratio(compared: dict, mine: str, others: str, key: str) -> dict[str, float]:
    """Spread of the ratios within each round, so that what slows a round slows both."""
    pairs = zip(compared[mine]["runs"], compared[others]["runs"], strict=True)
    return spread(own[key] / its[key] for own, its in pairs)


def report(name: str, found: dict) -> str:
    rows = [[kind, *(shown(its[key], 1) for key in RATES)] for kind, its in found["kinds"].items()]
    lines = [table([name, "images/s", "images per CPU-s"], rows), ""]
    rows = [
        [what, *(shown(its[key], 3) for key in RATES), f"≥ {its['goal']}" if its["goal"] else ""]
        for what, its in found["ratios"].items()
    ]
    lines += [table(["in the same round", "of images/s", "of images per CPU-s", "goal"], rows), ""]
    runs = found["kinds"][OURS]["runs"]
    shares = [statistics.median(run[f"evaluation_share, {key}"] for run in runs) for key in RATES]
    lines.append(f"An evaluation takes {shares[0]:.1%} of an epoch's time, {shares[1]:.1%} of its CPU time.")
    return "\n".join(lines)


def main() -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--only", choices=list(WHOLE), help="one network; writes no record")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    found = {}
    for name, training in trainings().items():
        if arguments.only in (None, name):
            found[name] = measure(name, arguments.rounds, arguments.threads, training)
            print("\n" + report(name, found[name]) + "\n", flush=True)
    if not arguments.only:
        record = {"environment": described, "threads": arguments.threads, "rounds": arguments.rounds, "found": found}
        print(write_record("train", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
