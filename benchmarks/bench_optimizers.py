"""How many epochs, steps and seconds does each optimizer need to an accuracy on Fashion-MNIST?

    python -m benchmarks.bench_optimizers [--model resnet8] [--batch-size 4096] [--trials 6] [--seeds 5] [--device cpu]

Each optimizer is tuned over as many trials, at points of its box spread by a Sobol sequence, the number of epochs
among them. The one with the fewest steps to 92 %, or else the best accuracy, is run with other seeds. Two trainings run
at a time, one thread each; evaluations are not timed. What is done is kept in benchmarks/work, and what was broken off
goes on there. Writes results/optimizers-MODEL-BATCH.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from scipy.stats import t as student
from torch.quasirandom import SobolEngine

from benchmarks.measure import WORK, environment, process, table, write_record
from benchmarks.optimizer_run import TARGETS, Run

EPOCHS = (4, 8, 12)
# The box of each: the settings of its section of a recipe, between two values on a logarithmic scale.
SGD = {"name": "sgd", "momentum": 0.9, "nesterov": True}
KFAC_SGD = {**SGD, "weight_decay": 5e-4}
OPTIMIZERS = {
    "SGD, Nesterov": ({**SGD, "lr": (0.03, 0.6), "weight_decay": (1e-5, 2e-3)}, {}),
    "LARS": ({"name": "lars", "nesterov": True, "lr": (1.0, 30.0), "weight_decay": (1e-5, 2e-3)}, {}),
    "LAMB": ({"name": "lamb", "lr": (0.003, 0.1), "weight_decay": (1e-4, 0.1)}, {}),
    "Muon": ({"name": "muon", "lr": (0.005, 0.2), "adam_lr": (5e-4, 0.02)}, {}),
    "SOAP": ({"name": "soap", "lr": (1e-3, 0.03), "weight_decay": (1e-4, 0.1)}, {}),
    "K-FAC": ({**KFAC_SGD, "preconditioner": "kfac", "lr": (4e-4, 3e-3)}, {"damping": (1e-6, 3e-4)}),
    "EKFAC": ({**KFAC_SGD, "preconditioner": "ekfac", "lr": (1e-3, 6e-3)}, {"damping": (1e-5, 1e-3)}),
}
KFAC = {"factor_update_steps": 2, "inv_update_steps": 4, "kl_clip": None}
FIRST_ORDER = ("SGD, Nesterov", "LARS", "LAMB")
HOPELESS = 0.75  # a trial ends halfway below this accuracy
# Batches are freed and allocated at every step; glibc would give their pages back each time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
DONE = WORK / "optimizers"


def trials(optimizer: str, number: int, model: str, batch_size: int, device: str = "cpu") -> Iterator[Run]:
    """Points of the box, spread evenly: the first of them are the same whatever the number."""
    section, kfac = OPTIMIZERS[optimizer]
    boxes = [(of, key) for of in (section, kfac) for key, value in of.items() if isinstance(value, tuple)]
    points = SobolEngine(1 + len(boxes), scramble=True, seed=0).draw(number).tolist()
    for epochs, *point in points:
        found = {id(section): dict(section), id(kfac): {**KFAC, **kfac} if kfac else {}}
        for (of, key), fraction in zip(boxes, point, strict=True):
            low, high = of[key]
            found[id(of)][key] = float(f"{low * (high / low) ** fraction:.3g}")
        epochs = EPOCHS[int(epochs * len(EPOCHS))]
        section_of_run, kfac_of_run = found[id(section)], found[id(kfac)]
        yield Run(model, batch_size, epochs, section_of_run, kfac_of_run, stop_below=HOPELESS, device=device)


def result(run: Run) -> list[dict]:
    """What its evaluations found, from before if it has been done."""
    settings = json.dumps(asdict(run), sort_keys=True)
    path = DONE / f"{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        output, _ = process([sys.executable, "-m", "benchmarks.optimizer_run", settings], env=os.environ | MALLOC)
        DONE.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps({"run": asdict(run), "found": json.loads(output)}))
        path.with_suffix(".part").rename(path)
        best = max(line["accuracy"] for line in json.loads(output))
        print(f"  {run.optimizer['name']}, {run.optimizer.get('preconditioner', 'none')}, {run.epochs} epochs, "
              f"seed {run.seed}: {best:.2%}", file=sys.stderr, flush=True)  # fmt: skip
    return json.loads(path.read_text())["found"]


def reached(found: list[dict], target: float) -> dict | None:
    return next((line for line in found if line["accuracy"] >= target), None)


def score(found: list[dict]) -> tuple[float, float]:
    """Smaller is better: the steps to the last target, or else the best accuracy."""
    line = reached(found, TARGETS[-1])
    return (line["step"] if line else math.inf, -max(line["accuracy"] for line in found))


def interval(values: list[float]) -> dict[str, float]:
    """The mean, and half the width of its 95 % interval (Student's t)."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean, "half_width": math.nan}
    return {
        "mean": mean,
        "half_width": student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5,
    }


def to_target(runs: list[list[dict]], target: float) -> dict:
    lines = [reached(found, target) for found in runs]
    those = [line for line in lines if line is not None]
    what = (
        {key: interval([line[key] for line in those]) for key in ("epoch", "step", "wall_s", "cpu_s")} if those else {}
    )
    return {"reached": len(those), "runs": len(runs), **what}


def report(found: dict[str, dict]) -> str:
    rows = []
    for name, of in found.items():
        cells = [name]
        for target in TARGETS:
            to = of["targets"][f"{target:.2f}"]
            for key, digits in (("epoch", 1), ("step", 0), ("wall_s", 0)):
                cells.append(
                    f"{to[key]['mean']:.{digits}f} ± {to[key]['half_width']:.{digits}f}" if to["reached"] else "-"
                )
            if to["reached"] < to["runs"]:
                cells[-3] += f" ({to['reached']} of {to['runs']})"
        rows.append(cells)
    header = ["to", *(f"{target:.0%} {what}" for target in TARGETS for what in ("epochs", "steps", "s"))]
    return table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet8", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4096, help="a multiple of 512 (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=6, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="of its best setting (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    where = arguments.model, arguments.batch_size, arguments.device
    tried = {name: list(trials(name, arguments.trials, *where)) for name in OPTIMIZERS}
    found = {}
    with ThreadPoolExecutor(2 if arguments.device == "cpu" else 1) as two:
        # The first trial of all, then the second of all, …: what is broken off is a comparison, too.
        turns = [run for turn in zip(*tried.values(), strict=True) for run in turn]
        results = dict(zip(map(str, turns), two.map(result, turns), strict=True))
        best = {name: min(runs, key=lambda run: score(results[str(run)])) for name, runs in tried.items()}
        seeds = [
            (name, replace(best[name], seed=seed, stop_below=0.0))
            for seed in range(1, 1 + arguments.seeds)
            for name in best
        ]
        again: dict[str, list] = {name: [] for name in best}
        for (name, _), of in zip(seeds, two.map(result, [run for _, run in seeds]), strict=True):
            again[name].append(of)
    for name, runs in tried.items():
        found[name] = {
            "trials": [{"settings": asdict(run), "steps_and_accuracy": score(results[str(run)])} for run in runs],
            "best": asdict(best[name]),
            "targets": {f"{target:.2f}": to_target(again[name], target) for target in TARGETS},
            "seeds": again[name],
        }
    print(report(found))
    settings = {**vars(arguments), "targets": TARGETS, "first_order": FIRST_ORDER}
    name = f"optimizers-{arguments.model}-{arguments.batch_size}" + ("-gpu" if arguments.device == "cuda" else "")
    print(write_record(name, {"environment": described, "settings": settings, "found": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
