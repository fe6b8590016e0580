"""How many images/s does a training reach, beside a usual loop, and beside itself without data to load?

    python -m benchmarks.bench_throughput [--rounds 7] [--only resnet8 resnet50] [--images 12000 1280] [--threads 2]

ResNet-8 on Fashion-MNIST, 28 pixels, and ResNet-50 on photographs, 96 pixels: the trainer with its loader, on images as
they are, on the same without the decoder in C, on images stored at 160 pixels, and on batches that are in memory; a
loop as in torchvision's reference scripts, as it is and with channels last in memory; and the latter on batches in
memory, which is what the network alone takes. The same torch, precision, threads and batch. Each is a process of its
own, which trains for an epoch whenever it is its turn; the first does not count. The trainer evaluates in its turns,
too. Ratios are of the epochs of a round. Writes results/throughput.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import corpus
from benchmarks.measure import (
    Child,
    column,
    command_line,
    environment,
    interleaved,
    shown,
    spread,
    summarise,
    table,
    write_record,
)
from benchmarks.train_epochs import LAST, NETWORK, OURS, OURS_IN_MEMORY, OURS_SMALL, OURS_WITHOUT_C, REFERENCE
from datapipe.images.recode import RecodeOptions
from datapipe.native import VARIABLE
from datapipe.packing import PackOptions
from trainer.config.recipe import load_recipe
from trainer.step.precision import choose_precision

FIGURES = {"images_per_s": "wall_s", "images_per_cpu_s": "cpu_s"}
VAL_IMAGES = 64


@dataclass(frozen=True)
class Case:
    """A recipe, what is changed in it to train here, and the ways that are compared."""

    recipe: str
    changes: tuple[str, ...]
    ways: tuple[str, ...]
    channels: int
    images: int  # to train on
    whole: tuple[int, int]  # images for training and validation of the recipe's data set

    def folder(self, images: int) -> Path:
        """The corpus, with `images/` and what is packed of it."""
        if self.channels == 1:
            return corpus.fashion_mnist(images)
        folder = corpus.photographs(images, VAL_IMAGES)
        corpus.packed_as(folder, "tar", PackOptions(format="tar", shard_mib=64))
        small = RecodeOptions(resize="short=160", quality=95, restart=8)
        corpus.packed_as(folder, "short160", PackOptions(format="tar", shard_mib=64, recode=small))
        return folder


ALL = (OURS, OURS_WITHOUT_C, OURS_SMALL, OURS_IN_MEMORY, REFERENCE, LAST, NETWORK)
SMALL_ALONE = tuple(way for way in ALL if way not in (OURS_SMALL, OURS_WITHOUT_C))  # of images that are small already
# The trainer's images/s over theirs, and what is aimed at.
GOALS = {REFERENCE: 1.15, OURS_IN_MEMORY: 0.97}
LARGE = ("data.size=96", "train.batch_size=64", 'schedule={name="constant"}', "train.checkpoint_every_steps=none",
         "model.num_classes=1000")  # fmt: skip
CASES = {
    "resnet8": Case("fashion-mnist-resnet8", (), SMALL_ALONE, 1, 12_000, (60_000, 10_000)),
    "resnet50": Case("imagenet-resnet50", LARGE, ALL, 3, 1280, (1_281_167, 50_000)),
}  # fmt: skip


def measure(case: Case, images: int, rounds: int, threads: int) -> dict:
    """All ways in turns."""
    changes = (*case.changes, f"data.threads={threads}")
    with ExitStack() as stack:
        children = {}
        for way in case.ways:
            words = [
                "-m",
                "benchmarks.train_epochs",
                way,
                str(case.folder(images)),
                case.recipe,
                str(threads),
                *changes,
            ]
            command = ["env", f"{VARIABLE}={int(way != OURS_WITHOUT_C)}", sys.executable, *words]
            children[way] = stack.enter_context(Child(way, command))
            children[way].ask(0)

        def run(way: str, number: int) -> dict:
            answer = children[way].ask(number + 1)
            figures = rates(answer)
            if "wait_s" in answer:
                figures["wait_share"] = answer["wait_s"] / answer["wall_s"]
            if way == OURS:
                of_evaluation = rates(children[way].ask("evaluate"))
                figures |= evaluation_shares(figures, of_evaluation, case.whole)
            return figures

        runs = interleaved(case.ways, rounds, run)
    ways = {way: summarise(its, (*FIGURES, *({"wait_share"} & its[0].keys()))) for way, its in runs.items()}
    shares = {name: column(runs[OURS], f"evaluation_{name}") for name in ("time", "cpu_time")}
    recipe = load_recipe(case.recipe, changes)
    precision = choose_precision(recipe.train.precision, torch.device("cpu")).name
    result = {"images": images, "changes": changes, "precision": precision, "ways": ways}
    result |= {"ratios": ratios(runs), "evaluation_share": shares}
    return result | {"corpus": corpus.describe(case.folder(images))}


def rates(answer: dict) -> dict[str, float]:
    return {figure: answer["images"] / answer[unit] for figure, unit in FIGURES.items()}


def evaluation_shares(training: dict, evaluation: dict, whole: tuple[int, int]) -> dict[str, float]:
    """Return how long one evaluation takes, as a share of an epoch, on the recipe's whole data set."""
    train_images, val_images = whole
    names = ("evaluation_time", "evaluation_cpu_time")
    return {
        name: val_images / evaluation[figure] / (train_images / training[figure])
        for name, figure in zip(names, FIGURES, strict=True)
    }


def ratios(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Return the trainer's images/s over the other ways', by round, and whether the median meets the goal."""
    by_way: dict[str, dict] = {}
    for way in (way for way in runs if way != OURS):
        pairs = [*zip(runs[OURS], runs[way], strict=True)]
        by_way[way] = spread(ours["images_per_s"] / its["images_per_s"] for ours, its in pairs)
        by_way[way]["of_cpu"] = spread(ours["images_per_cpu_s"] / its["images_per_cpu_s"] for ours, its in pairs)
        if way in GOALS:
            by_way[way] |= {"goal": GOALS[way], "met": by_way[way]["median"] >= GOALS[way]}
    return by_way


def report(cases: dict[str, dict]) -> str:
    header = ["", "images/s", "images/CPU-s", "waiting, %", "trainer's over it", "by CPU time", "goal"]
    rows = []
    for name, case in cases.items():
        for way, its in case["ways"].items():
            cells = ["", "", ""]
            if (ratio := case["ratios"].get(way)) is not None:
                goal = f"≥ {ratio['goal']:g}: {'met' if ratio['met'] else 'missed'}" if "goal" in ratio else ""
                cells = [shown(ratio, 2), shown(ratio["of_cpu"], 2), goal]
            percent = {key: 100 * share for key, share in its.get("wait_share", {}).items()}
            waiting = shown(percent, 1) if percent else ""
            rows.append([f"{name}, {way}", *(shown(its[figure], 1) for figure in FIGURES), waiting, *cells])
    lines = [table(header, rows)]
    for name, case in cases.items():
        time, cpu_time = (case["evaluation_share"][key]["median"] for key in ("time", "cpu_time"))
        lines.append(f"{name}: an evaluation takes {time:.1%} of an epoch's time, {cpu_time:.1%} of its CPU time.")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES], metavar="CASE", help="(default: all)")
    parser.add_argument("--images", type=int, nargs="+", metavar="N", help="to train on, for each case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    arguments = parser.parse_args(words)
    counts = arguments.images or [CASES[name].images for name in arguments.only]
    if len(counts) != len(arguments.only):
        parser.error(f"--images: {len(counts)} numbers for {len(arguments.only)} cases")
    record: dict = {"environment": environment(), "rounds": arguments.rounds, "threads": arguments.threads, "cases": {}}
    for name, images in zip(arguments.only, counts, strict=True):
        record["cases"][name] = measure(CASES[name], images, arguments.rounds, arguments.threads)
    print(report(record["cases"]) + "\n\nMedians (smallest–largest) over the rounds.")
    print(write_record("throughput", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
