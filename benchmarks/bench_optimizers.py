"""How many epochs, steps and seconds does each optimizer need to an accuracy on Fashion-MNIST?

    python -m benchmarks.bench_optimizers [--model resnet8] [--batch-size 4096] [--trials 13] [--seeds 5] …

Each optimizer has two settings to tune, over as many trials, in a box that spans a factor of 1,000 in each, and from
the 11th trial on 10,000, for whom the box is too narrow: first at points of a Sobol sequence, then where a Gaussian
process of the trials so far expects the most (Optuna's). With `--near`, boxes span a factor of 10 around the best
settings of another record, and from the fifth trial on 100, so that few trials do.
Trials are short, and do not see the test images. The best setting is run with several seeds, from 1 on. A
seed that does not reach an accuracy counts as missed, and the mean is then only of the others. Two trainings run at a
time, one thread each; evaluations are not timed. Writes results/optimizers-MODEL-BATCH.json after every training, and
does none again that is there already: remove the file to begin again. Its summary is of the seeds that all optimizers
have done, on one kind of machine.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import optuna
from torch.quasirandom import SobolEngine

from benchmarks.measure import RESULTS, command_line, environment, process, table, write_record
from benchmarks.optimizer_run import TARGETS, Run
from trainer.measuring.statistics import student_quantile

SPREAD = 4  # trials at points of the Sobol sequence
WIDENED = 10  # by what a box widens
NEAR = {"width": 10, "narrow": SPREAD}


@dataclass(frozen=True)
class Around:
    """A setting to tune: its box's centre on a logarithmic scale, and its largest value in parts of the smallest."""

    centre: float
    width: float = 1000
    narrow: int = 10  # trials before the box widens

    def box(self, number: int) -> optuna.distributions.FloatDistribution:
        """In which the trial after `number` others looks."""
        width = self.width * (1 if number < self.narrow else WIDENED)
        return optuna.distributions.FloatDistribution(self.centre / width**0.5, self.centre * width**0.5, log=True)


# Sections of a recipe, and settings of the preconditioner.
SGD = {"name": "sgd", "momentum": 0.9, "nesterov": True}
OPTIMIZERS = {
    "SGD, Nesterov": ({**SGD, "lr": Around(0.12), "weight_decay": Around(1e-4)}, {}),
    "LARS": ({"name": "lars", "nesterov": True, "lr": Around(8.0), "weight_decay": Around(1e-4)}, {}),
    "LAMB": ({"name": "lamb", "lr": Around(0.012), "weight_decay": Around(0.01)}, {}),
    "Muon": ({"name": "muon", "lr": Around(0.02), "adam_lr": Around(2e-3)}, {}),
    "SOAP": ({"name": "soap", "lr": Around(4e-3), "weight_decay": Around(0.01)}, {}),
    "K-FAC": ({**SGD, "preconditioner": "kfac", "lr": 0.1}, {"damping": Around(3e-3), "kl_clip": Around(1e-3)}),
    "EKFAC": ({**SGD, "preconditioner": "ekfac", "lr": 0.1}, {"damping": Around(3e-3), "kl_clip": Around(1e-3)}),
}
FIRST_ORDER = ("SGD, Nesterov", "LARS", "LAMB")
GOAL = {"step": 0.6, "wall_s": 0.75, "cpu_s": 0.75}  # of K-FAC, against the best of them in each
SUMMARY = "found", "shares", "goal"
COLUMNS = {"epoch": 1, "step": 0, "wall_s": 0, "cpu_s": 0}  # digits
HOPELESS = 0.7  # a trial ends halfway below this accuracy
# Batches are freed and allocated at every step; glibc would give their pages back each time.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


def kfac_settings(batch_size: int) -> dict:
    """Factors from 512 images every 8,192, and solutions every 16,384: about the same work an image for any batch of
    512 × a power of 2 up to 8,192.
    """
    return {"factor_update_steps": max(1, 8192 // batch_size), "inv_update_steps": max(1, 16384 // batch_size),
            "factor_fraction": min(1.0, 512 / batch_size), "factor_decay": 0.95}  # fmt: skip


class Runs:
    """The trainings of a record, of which none is done twice, and what sums them up. For one process at a time."""

    def __init__(self, name: str, settings: dict) -> None:
        path = RESULTS / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {"environments": [], "runs": []}
        self.name, self.settings = name, settings
        self.summary: Callable[[], dict] = lambda: {key: before[key] for key in SUMMARY if key in before}
        self._environments, self._done, self._here = before["environments"], before["runs"], environment()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Run]:
        return (Run(**done["run"]) for done in self._done)

    def __getitem__(self, run: Run) -> list[dict]:
        """What its evaluations found."""
        return next(done["found"] for done in self._done if done["run"] == asdict(run))

    def machine(self, run: Run) -> str:
        """On which it was done."""
        environment = self._environments[next(done["environment"] for done in self._done if done["run"] == asdict(run))]
        return json.dumps({key: environment[key] for key in ("cpu", "cores", "versions")})

    def whole(self, rounds: Iterable[dict[str, Run]]) -> list[dict[str, Run]]:
        """The rounds (a run of each optimizer, with one seed) that are done, each on one kind of machine."""
        rounds = [turn for turn in rounds if all(run in self for run in turn.values())]
        return [turn for turn in rounds if len({self.machine(run) for run in turn.values()}) == 1]

    def do(self, run: Run) -> None:
        """Unless it has been done; the record is written after it. May be called by several threads."""
        if run in self:
            return
        command = [sys.executable, "-m", "benchmarks.optimizer_run", json.dumps(asdict(run))]
        lines = json.loads(process(command, env=ENVIRONMENT)[0])
        print(f"  {run.optimizer['name']}, {run.optimizer.get('preconditioner', 'none')}, {run.epochs} epochs, "
              f"seed {run.seed}: {best_of(lines):.2%}", file=sys.stderr, flush=True)  # fmt: skip
        with self._lock:
            if self._environments[-1:] != [self._here]:
                self._environments.append(self._here)
            self._done.append({"run": asdict(run), "environment": len(self._environments) - 1, "found": lines})
            self.write()

    def write(self) -> Path:
        record = {"environments": self._environments, "settings": self.settings, **self.summary(), "runs": self._done}
        return write_record(self.name, record)


def near(name: str) -> dict[str, tuple[dict, dict]]:
    """OPTIMIZERS, with boxes around the best settings of a record that has seeds."""
    earlier = json.loads((RESULTS / f"{name}.json").read_text())["found"]

    def around(part: dict, best: dict) -> dict:
        return {key: Around(best[key], **NEAR) if isinstance(part[key], Around) else part[key] for key in part}

    return {
        name: (around(section, earlier[name]["best"]["optimizer"]), around(kfac, earlier[name]["best"]["kfac"]))
        for name, (section, kfac) in OPTIMIZERS.items()
    }


def tried(runs: Iterable[Run], name: str, like: Run) -> list[Run]:
    """The trials of an optimizer, of those that are `like` this one in all that is not tuned."""

    def kind(section: dict) -> tuple[str, str | None]:
        return section["name"], section.get("preconditioner")

    alike = (run for run in runs if replace(run, optimizer={}, kfac={}) == like)
    return [run for run in alike if kind(run.optimizer) == kind(OPTIMIZERS[name][0])]


def next_trial(sections: tuple[dict, dict], before: Sequence[tuple[Run, float]], like: Run) -> Run:
    """What to try of one of OPTIMIZERS after the trials `before`, of which the accuracies are known; `like` has all
    that is not tuned.
    """
    section, kfac = sections
    boxes = {key: value.box(len(before)) for key, value in (section | kfac).items() if isinstance(value, Around)}
    study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=len(before), n_startup_trials=SPREAD))
    for run, accuracy in before:
        values = {key: (run.optimizer | run.kfac)[key] for key in boxes}
        error = math.log(max(1 - accuracy, 1e-4))  # so that the best of them differ, too
        study.add_trial(optuna.trial.create_trial(params=values, distributions=boxes, value=error))
    values = study.ask(boxes).params if len(before) >= SPREAD else None
    if values is None or any(trial.params == values for trial in study.trials[: len(before)]):
        point = SobolEngine(len(boxes), scramble=True, seed=0).draw(len(before) + 1)[-1].tolist()
        values = {
            key: box.low * (box.high / box.low) ** part for (key, box), part in zip(boxes.items(), point, strict=True)
        }
    parts = [{key: values.get(key, value) for key, value in part.items()} for part in (section, kfac)]
    return replace(like, optimizer=parts[0], kfac=kfac_settings(like.batch_size) | parts[1] if kfac else {})


def best_of(lines: list[dict]) -> float:
    return max(line["accuracy"] for line in lines)


def reached(lines: list[dict], target: float) -> dict | None:
    return next((line for line in lines if line["accuracy"] >= target), None)


def interval(values: list[float]) -> dict[str, float | None]:
    """The mean, and half the width of its 95 % interval (Student's t), which a single value has not."""
    n = len(values)
    half_width = student_quantile(n - 1) * statistics.stdev(values) / n**0.5 if n > 1 else None
    return {"mean": statistics.mean(values), "half_width": half_width}


def paired_ratio(ours: Sequence[dict], theirs: Sequence[dict], key: str) -> tuple[float, list[float] | None]:
    """The geometric mean of the pairs' ratios, and its 95 % interval (Student's t, of the logarithms), None of one."""
    logs = interval([math.log(mine[key] / its[key]) for mine, its in zip(ours, theirs, strict=True)])
    half_width = logs["half_width"]
    ends = None if half_width is None else [math.exp(logs["mean"] + sign * half_width) for sign in (-1, 1)]
    return math.exp(logs["mean"]), ends


def to_target(runs: list[list[dict]], target: float) -> dict:
    lines = [reached(run, target) for run in runs]
    those = [line for line in lines if line is not None]
    what = {key: interval([line[key] for line in those]) for key in COLUMNS} if those else {}
    return {"reached": len(those), "runs": len(runs), **what}


def share(runs: dict[str, list[list[dict]]], target: float, key: str) -> dict | None:
    """K-FAC's steps or seconds to a target, in parts of those of the first-order optimizer with the fewest: the
    geometric mean over the seeds, with its 95 % interval.

    A seed with which that one misses the target counts with all of its run, which is less than it needs: the share is
    then "at most". None where K-FAC itself misses it.
    """
    kfac = [reached(run, target) for run in runs["K-FAC"]]
    if None in kfac:
        return None
    lines = {name: [reached(run, target) or run[-1] for run in runs[name]] for name in FIRST_ORDER}
    best = min(FIRST_ORDER, key=lambda name: statistics.mean(line[key] for line in lines[name]))
    ratio, ends = paired_ratio(kfac, lines[best], key)
    return {
        "share": ratio,
        "of": best,
        "at_most": any(line["accuracy"] < target for line in lines[best]),
        "interval": ends,
        "met": ends is not None and ends[1] <= GOAL[key],
    }


def summary(
    done: Runs, trials: dict[str, list[Run]], best: dict[str, Run], rounds: Sequence[dict[str, Run]]
) -> dict[str, dict]:
    """Of the rounds that are done."""
    rounds = done.whole(rounds)
    if not rounds:
        return {}
    runs = {name: [done[turn[name]] for turn in rounds] for name in trials}
    results = {
        name: {
            "trials": [settings(run) | {"accuracy": best_of(done[run])} for run in tried],
            "best": settings(best[name]),
            "targets": {f"{target:.2f}": to_target(runs[name], target) for target in TARGETS},
            "wall_over_cpu": [lines[-1]["wall_s"] / lines[-1]["cpu_s"] for lines in runs[name]],
        }
        for name, tried in trials.items()
    }
    shares = {f"{target:.2f}": {key: share(runs, target, key) for key in GOAL} for target in TARGETS}
    return dict(zip(SUMMARY, (results, shares, GOAL), strict=True))


def settings(run: Run) -> dict[str, dict]:
    return {"optimizer": run.optimizer, "kfac": run.kfac}


def report(results: dict[str, dict]) -> str:
    rows = []
    for name, its in results.items():
        cells = [name]
        for target in TARGETS:
            to = its["targets"][f"{target:.2f}"]
            for key, digits in COLUMNS.items():
                of_key = to.get(key)
                cells.append("-" if of_key is None else f"{of_key['mean']:.{digits}f}")
                if of_key is not None and of_key["half_width"] is not None:
                    cells[-1] += f" ± {of_key['half_width']:.{digits}f}"
            if to["reached"] < to["runs"]:
                cells[-len(COLUMNS)] += f" ({to['reached']} of {to['runs']})"
        rows.append(cells)
    header = ["to", *(f"{target:.0%} {what}" for target in TARGETS for what in ("epochs", "steps", "s", "CPU s"))]
    return table(header, rows)


def report_shares(shares: dict[str, dict]) -> str:
    rows = []
    for target, of_keys in shares.items():
        for key, its in of_keys.items():
            cells = [f"{float(target):.0%} {key}", str(GOAL[key])]
            if its is not None:
                ends = " ({:.2f}–{:.2f})".format(*its["interval"]) if its["interval"] else ""
                share = f"{'≤ ' if its['at_most'] else ''}{its['share']:.2f}{ends}"
                cells += [share, its["of"], "yes" if its["met"] else "no"]
            rows.append([*cells, "missed", "", "no"][:5])
    return table(["K-FAC to", "goal", "share (95 %)", "of", "met"], rows)


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet8", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4096, help="a multiple of 512 (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=13, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="of its best setting (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="a seed's at most (default: %(default)s)")
    parser.add_argument("--tuning-epochs", type=int, default=10, help="a trial's (default: %(default)s)")
    parser.add_argument("--near", help="boxes around the best settings of a record: optimizers-resnet8-4096")
    parser.add_argument("--precision", default="bf16", help="bf16 or off (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    arguments = parser.parse_args()
    like = Run(arguments.model, arguments.batch_size, arguments.tuning_epochs, {}, tuning=True, stop_below=HOPELESS,
               device=arguments.device, precision=arguments.precision)  # fmt: skip
    name = f"optimizers-{arguments.model}-{arguments.batch_size}" + ("-gpu" if arguments.device == "cuda" else "")
    done = Runs(name, vars(arguments) | {"targets": TARGETS})
    optimizers = near(arguments.near) if arguments.near else OPTIMIZERS
    parallel = 2 if arguments.device == "cpu" else 1
    # The first trial of all, then the second of all, …: what is broken off is a comparison, too.
    turns = [name for turn in range(arguments.trials) for name in OPTIMIZERS if turn >= len(tried(done, name, like))]
    turn_of, asking = defaultdict(threading.Lock), threading.Lock()  # one trial of an optimizer at a time

    def tune(name: str) -> None:
        with turn_of[name]:
            with asking:
                run = next_trial(optimizers[name], [(run, best_of(done[run])) for run in tried(done, name, like)], like)
            done.do(run)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(tune, turns))
    trials = {name: tried(done, name, like) for name in OPTIMIZERS}
    best = {name: max(runs, key=lambda run: best_of(done[run])) for name, runs in trials.items()}
    final = {"tuning": False, "stop_below": 0.0, "epochs": arguments.epochs}
    rounds = [
        {name: replace(run, seed=seed, **final) for name, run in best.items()} for seed in range(1, 1 + arguments.seeds)
    ]
    done.summary = lambda: summary(done, trials, best, rounds)
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(done.do, (run for turn in rounds for run in turn.values())))
    summed = done.summary()
    if summed:
        print(report(summed["found"]), report_shares(summed["shares"]), sep="\n\n")
    print(done.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
