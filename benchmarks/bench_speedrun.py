"""In how many seconds does Fashion-MNIST's speedrun reach 92.0 % on this machine, and what does each of its ideas save?

    python -m benchmarks.bench_speedrun [--seeds 5] [--only NAME …] [--over NAME] [--record speedrun]

The recipe `fashion-mnist-speedrun` against the plain `fashion-mnist-resnet8`, both for the same target, each with the
learning rate and the epochs that were fastest to the target in equally many trials, whose seed is not counted. Then the
speedrun without one of its ideas, or with another in its place, tuned again over the epochs. All are trained with each
seed, in turns, one process after another. The time to target is a run's own, from its start to the
first evaluation at or above the target; a seed that misses it counts as missed, and the mean is then of the others.
Writes results/RECORD.json after every training, and does none again that is there: remove the file to begin again.
Another machine, or other versions, need another record; it need not have the plain recipe: "--over speedrun" compares
with the speedrun.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import corpus
from benchmarks.measure import RESULTS, WORK, command_line, environment, process, table, write_record
from trainer.config.recipe import load_recipe
from trainer.measuring.runs import settings_alike
from trainer.measuring.statistics import describe, mean_ratio
from trainer.reporting.runlog import finite

TARGET = 0.92
TRIAL_SEED = 1000
PLAIN, SPEEDRUN = "fashion-mnist-resnet8", "fashion-mnist-speedrun"
MUON = 'optimizer={name="muon", lr=%g, adam_lr=0.002}'


@dataclass(frozen=True)
class Variant:
    """A recipe with changes, and what is tried: each learning rate with each number of epochs."""

    recipe: str
    changes: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.4,)
    epochs: tuple[int, ...] = (3, 4, 5)
    rate: str = "optimizer.lr=%g"

    def trials(self) -> Iterator[tuple[str, ...]]:
        """Yield the settings of each trial."""
        for rate, epochs in itertools.product(self.rates, self.epochs):
            yield (*self.changes, self.rate % rate, f"train.epochs={epochs}")


BASE = "plain ResNet-8"
VARIANTS = {
    BASE: Variant(PLAIN, (), (0.2, 0.4, 0.8)),
    "speedrun": Variant(SPEEDRUN, (), (0.2, 0.4, 0.8)),
    "images decoded each epoch": Variant(SPEEDRUN, ("data.backend=cpu",)),
    "flips at random": Variant(SPEEDRUN, ("data.flip=true",)),
    "shifted by up to a pixel": Variant(SPEEDRUN, ("data.crop=pad", "data.pad=1")),
    "no flips": Variant(SPEEDRUN, ("data.flip=false",)),
    "evaluated without mirrored images": Variant(SPEEDRUN, ("train.evaluate_mirrored=false",)),
    "ResNet-8, nothing whitened": Variant(SPEEDRUN, ("model.name=resnet8",)),
    "Muon": Variant(SPEEDRUN, (), (0.01, 0.03), rate=MUON),
    "K-FAC": Variant(SPEEDRUN, ("optimizer.preconditioner=kfac",), (0.1,)),
}


class Runs:
    """The trainings so far, in the record; `train` does what is not there yet."""

    def __init__(self, name: str, data: Path) -> None:
        self._name, self._data, self._here = name, data, environment()
        path = RESULTS / f"{name}.json"
        recipes = {name: load_recipe(name).model_dump(mode="json") for name in (PLAIN, SPEEDRUN)}
        self.record: dict[str, Any] = {"environment": self._here, "recipes": recipes, "runs": []}
        if path.exists():
            self.record = json.loads(path.read_text())
            before, machine = self.record["recipes"], ("cpu", "cores", "versions")
            are_alike = all(settings_alike(before[name]) == settings_alike(recipes[name]) for name in recipes)
            if any(self.record["environment"][key] != self._here[key] for key in machine) or not are_alike:
                raise ValueError(
                    f"{path.name} is of another machine, or of other versions or recipes: choose another --record"
                )

    def train(self, recipe: str, changes: tuple[str, ...], seed: int) -> dict:
        """Return what a training took, from the record or by doing it."""
        key = {"recipe": recipe, "changes": [*changes], "seed": seed}
        known = next((run for run in self.record["runs"] if key.items() <= run.items()), None)
        if known is None:
            code = {name: self._here[name] for name in ("commit", "uncommitted_changes")}
            known = key | self._train(recipe, changes, seed) | code
            self.record["runs"].append(known)
            self.write()
        return known

    def write(self) -> Path:
        return write_record(self._name, self.record)

    def _train(self, recipe: str, changes: tuple[str, ...], seed: int) -> dict:
        out = WORK / "runs" / "speedrun"
        shutil.rmtree(out, ignore_errors=True)
        settings = (*changes, f"train.seed={seed}", f"train.target_accuracy={TARGET}")
        words = [word for change in settings for word in ("--set", change)]
        command = [sys.executable, "-m", "trainer", "train", recipe, "--data", str(self._data), "--out", str(out)]
        _, took = process([*command, *words], (0, 1))
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        end = events[-1]
        if end["status"] not in ("target_reached", "target_missed"):
            raise ChildProcessError(f"{recipe}: {end['status']}, see {out / 'metrics.jsonl'}")
        keys = ("status", "best_accuracy", "time_to_target_s", "elapsed_s", "images_per_s", "wait_share")
        epochs = sum(event["event"] == "epoch" for event in events)
        print(recipe, *settings, f"{end['best_accuracy']:.2%}, {end['elapsed_s']:.0f} s", flush=True)
        return {"trained_epochs": epochs, **{key: end[key] for key in keys}, **took}


def tune(runs: Runs, variant: Variant) -> tuple[str, ...]:
    """Return the settings of the trial that was fastest to the target; where none reached it, of the most accurate."""
    trials = [(runs.train(variant.recipe, changes, TRIAL_SEED), changes) for changes in variant.trials()]
    reached = [(run["time_to_target_s"], changes) for run, changes in trials if run["time_to_target_s"] is not None]
    if reached:
        return min(reached)[1]
    return max(trials, key=lambda trial: trial[0]["best_accuracy"])[1]


def summarise(runs_of: dict[str, list[dict]], over: str) -> dict[str, dict]:
    """Return of each variant how many seeds reached the target, their means, and the ratio to the variant `over`."""
    by_variant = {}
    base = [run["time_to_target_s"] for run in runs_of[over] if run["time_to_target_s"] is not None]
    for name, its in runs_of.items():
        reached = [run for run in its if run["time_to_target_s"] is not None]
        times = [run["time_to_target_s"] for run in reached]
        by_variant[name] = {
            "changes": its[0]["changes"],
            "seeds": len(its),
            "reached": len(reached),
            "time_to_target_s": finite(vars(describe(times))),
            "cpu_s": finite(vars(describe([run["process_cpu_s"] for run in reached]))),
            "epochs": finite(vars(describe([run["trained_epochs"] for run in reached]))),
            "best_accuracy": finite(vars(describe([run["best_accuracy"] for run in its]))),
            "ratio": finite(vars(mean_ratio(base, times))),
        }
    return by_variant


def show(by_variant: dict[str, dict], over: str) -> str:
    """Return a table of what `summarise` returned."""

    def cell(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    header = ["to 92.0 %", "reached", "seconds", "95 %", "epochs", "best, %", f"of {over}", "95 %"]
    rows = []
    for name, its in by_variant.items():
        time, ratio = its["time_to_target_s"], its["ratio"]
        row = [name, f"{its['reached']} of {its['seeds']}"]
        row += [cell(time["mean"], 1), f"{cell(time['low'], 1)}–{cell(time['high'], 1)}"]
        row += [cell(its["epochs"]["mean"], 1), cell(100 * its["best_accuracy"]["mean"], 2), cell(ratio["value"], 2)]
        rows.append([*row, f"{cell(ratio['low'], 2)}–{cell(ratio['high'], 2)}"])
    return table(header, rows)


def main(words: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="of each variant (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[*VARIANTS], choices=[*VARIANTS], metavar="NAME",
                        help="variants (default: all)")  # fmt: skip
    parser.add_argument("--over", default=BASE, choices=[*VARIANTS], metavar="NAME",
                        help="what others are compared with, and is trained, too (default: %(default)s)")  # fmt: skip
    parser.add_argument("--record", default="speedrun", help="its name (default: %(default)s)")
    arguments = parser.parse_args(words)
    try:
        runs = Runs(arguments.record, corpus.fashion_mnist() / "tar")
    except ValueError as error:
        parser.error(str(error))
    if runs.record.setdefault("over", arguments.over) != arguments.over:
        parser.error(f"--over {arguments.over}: {arguments.record}.json is over {runs.record['over']}")
    chosen = {name: tune(runs, VARIANTS[name]) for name in VARIANTS if name in (arguments.over, *arguments.only)}
    runs_of: dict[str, list[dict]] = {name: [] for name in chosen}
    for seed in range(arguments.seeds):
        for name, changes in chosen.items():
            runs_of[name].append(runs.train(VARIANTS[name].recipe, changes, seed))
    summary = runs.record.get("summary", {}) | summarise(runs_of, arguments.over)
    runs.record["summary"] = {name: summary[name] for name in VARIANTS if name in summary}
    print("\n" + show(runs.record["summary"], arguments.over))
    print(runs.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
