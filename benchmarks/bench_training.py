"""How fast does a recipe train, and how long does it wait for data, with each loader behind it?

    python -m benchmarks.bench_training [--rounds 5] [--epochs 2] [--images 12000]

ResNet-8 on Fashion-MNIST, as the recipe says, with fewer epochs and images: the project's own `trainer
train`, and a plain PyTorch loop fed by the peers. Every run is a process of its own; the runs alternate.
Then the recipe once as shipped: accuracy and time to target. Prints a table, writes results/training.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import WORK, command_line, compare, environment, process, shown, table, write_record
from trainer.config.recipe import load_recipe

RECIPE = "fashion-mnist-resnet8"
OURS = "trainer + datapipe"
PLAIN = "plain loop + "
PEERS = ("datapipe, tar", "ImageFolder + Pillow", "WebDataset + Pillow")  # names in benchmarks.peers
FIGURES = ("images_per_s", "wait_share", "process_wall_s", "process_cpu_s", "accuracy")


def run_module(*words: str, allowed: tuple[int, ...] = (0,)) -> tuple[str, dict]:
    try:
        return process([sys.executable, "-m", *words], allowed)
    except ChildProcessError as error:
        raise SystemExit(f"error: {error}") from None


def with_trainer(data: Path, *changes: str, allowed: tuple[int, ...] = (0,)) -> dict:
    """`trainer train` in a fresh folder; what its metrics say of the whole run."""
    out = WORK / "runs" / RECIPE
    shutil.rmtree(out, ignore_errors=True)
    settings = [word for change in changes for word in ("--set", change)]
    words = ("trainer", "train", RECIPE, "--data", str(data), "--out", str(out), *settings)
    _, seconds = run_module(*words, allowed=allowed)
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    end, steps = events[-1], [event["step"] for event in events if event["event"] == "epoch"]
    keys = ("images_per_s", "wait_share", "accuracy", "best_accuracy", "time_to_target_s", "elapsed_s", "status")
    images = steps[-1] * events[0]["global_batch_size"]
    return {"images": images, **{key: end[key] for key in keys}, **seconds, "time_s": end["time_s"]}


def with_plain_loop(peer: str, folder: Path, *changes: str) -> dict:
    output, seconds = run_module("benchmarks.plain_training", peer, str(folder), RECIPE, *changes)
    return json.loads(output.splitlines()[-1]) | seconds


def report(runs: dict[str, dict]) -> str:
    header = ["Fashion-MNIST", "images/s", "waiting, %", "wall s", "CPU s", "accuracy, %"]
    scales, digits = (1, 100, 1, 1, 100), (0, 1, 0, 0, 1)
    rows = []
    for name, result in runs.items():
        cells = []
        for figure, scale, digit in zip(FIGURES, scales, digits, strict=True):
            cells.append(shown({key: value * scale for key, value in result[figure].items()}, digit))
        rows.append([name, *cells])
    return table(header, rows)


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--images", type=int, default=12_000, help="to train on (default: %(default)s)")
    arguments = parser.parse_args()

    described = environment()
    folder = corpus.fashion_mnist(arguments.images)
    changes = (f"train.epochs={arguments.epochs}", "train.target_accuracy=none", "data.threads=2", "data.backend=cpu")

    def run(name: str, number: int) -> dict:
        seed = f"train.seed={number}"  # each round has another network and order, so that accuracy has a spread
        if name == OURS:
            return with_trainer(folder / "tar", *changes, seed)
        return with_plain_loop(name.removeprefix(PLAIN), folder, *changes, seed)

    compared = compare([OURS, *(PLAIN + peer for peer in PEERS)], arguments.rounds, run, FIGURES)
    print("\n" + report(compared) + "\n\nMedians (smallest–largest) over the runs.", flush=True)

    shipped = with_trainer(corpus.fashion_mnist() / "tar", allowed=(0, 1))  # 1: target missed, which is a result, too
    print(f"The recipe as shipped: {shipped['status']}, {shipped['accuracy']:.2%}, {shipped['elapsed_s']:.0f} s")
    record = {
        "environment": described,
        "corpus": corpus.describe(folder),
        "recipe": load_recipe(RECIPE).model_dump(mode="json"),
        "compared": {"epochs": arguments.epochs, "rounds": arguments.rounds, "workers": 2, "loaders": compared},
        "as_shipped": shipped,
    }
    print(write_record("training", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
