"""Does K-FAC reach an accuracy in fewer seconds than the best other optimizer, Muon and SOAP included?

    python -m benchmarks.bench_kfac_seconds [--model resnet8] [--batch-size 4096] [--seeds 5] [--first-seed 1]
                                           [--others Muon SOAP] [--float32] [--kfac damping=1e-4 …]
                                           [--sgd momentum=0.8 …]

Trains as bench_optimizers does, with the best settings that it recorded, K-FAC's with the changes of `--kfac` and, to
the SGD that takes its gradients, `--sgd`. The others are Muon and SOAP, which are faster than SGD, LARS and LAMB in all
of those records. Two trainings run at a time, one thread each, all of a seed after another, so that they share the
machine's hours. A goal is met in CPU seconds: other programs add to the clock's alone, or nearly. Where they share a
core's caches and units they add to CPU seconds, too; so the ratio is also counted from the steps of each run and the
median cost of a step of its optimizer, over all runs. After every training it writes
results/kfac-seconds-MODEL-BATCH.json, with `--float32` one of its own, and does none again that is there already:
remove the file to begin again. The record keeps runs with other seeds and, of K-FAC, with other changes, which the
summary leaves out. A claim is to hold with seeds that no trial has seen: the records' trials and runs are of 0 to 5.
"""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from benchmarks.bench_optimizers import Runs, paired_ratio, reached, report, to_target
from benchmarks.measure import RESULTS, command_line, table
from benchmarks.optimizer_run import TARGETS, Run

OTHERS = ("Muon", "SOAP")
GOALS = {512: 1.0, 4096: 0.8}  # of the other's seconds, by batch
KEYS = "step", "wall_s", "cpu_s", "median_cpu_s"


def cost_of_step(runs: list[list[dict]]) -> float:
    """Return the median of a step's CPU seconds, between two evaluations, over all runs of an optimizer."""
    return statistics.median(
        (end["cpu_s"] - begin["cpu_s"]) / (end["step"] - begin["step"])
        for lines in runs
        for begin, end in pairwise([{"step": 0, "cpu_s": 0.0}, *lines])
    )


def ratios(kfac: list[list[dict]], other: list[list[dict]], target: float) -> dict | None:
    """Return K-FAC's steps, seconds, CPU seconds and CPU seconds of median steps to a target over another's.

    Each is the geometric mean over the seeds.

    Args:
        kfac: What each seed's evaluations found.
        other: The same of the other optimizer. A seed that misses the target counts with all of its run, which is less
            than it needs: the ratio is then "at most".
        target: The accuracy.

    Returns:
        By what is counted the ratio and its 95 % interval; None where K-FAC misses it.
    """
    ours = [reached(lines, target) for lines in kfac]
    if None in ours:
        return None
    theirs = [reached(lines, target) or lines[-1] for lines in other]
    result: dict = {"at_most": any(line["accuracy"] < target for line in theirs)}
    ours, theirs = (
        [line | {"median_cpu_s": line["step"] * cost_of_step(runs)} for line in lines]
        for lines, runs in ((ours, kfac), (theirs, other))
    )
    for key in KEYS:
        ratio, ends = paired_ratio(ours, theirs, key)
        result[key] = {"ratio": ratio, "interval": ends}
    return result


def summarise(done: Runs, rounds: list[dict[str, Run]], goal: float) -> dict:
    """Return the means to each target of the rounds that are done, and K-FAC's ratios to the others."""
    rounds = done.whole(rounds)
    if not rounds:
        return {}
    runs = {name: [done[turn[name]] for turn in rounds] for name in rounds[0]}
    means = {name: {"targets": {f"{t:.2f}": to_target(lines, t) for t in TARGETS}} for name, lines in runs.items()}
    compared = {
        f"{target:.2f}": {name: ratios(runs["K-FAC"], runs[name], target) for name in runs if name != "K-FAC"}
        for target in TARGETS
    }
    return {"found": means, "shares": compared, "goal": goal}


def report_ratios(compared: dict[str, dict], goal: float) -> str:
    rows = []
    for target, by_name in compared.items():
        for name, its in by_name.items():
            if its is None:
                rows.append([f"{float(target):.0%}", name, "missed", *[""] * (len(KEYS) - 1), "no"])
                continue
            cells = []
            for key in KEYS:
                ends = " ({:.2f}–{:.2f})".format(*its[key]["interval"]) if its[key]["interval"] else ""
                cells.append(f"{its[key]['ratio']:.2f}{ends}")
            met = "yes" if its["cpu_s"]["ratio"] <= goal else "no"
            rows.append([f"{float(target):.0%}", ("at most, " if its["at_most"] else "") + name, *cells, met])
    return table(["K-FAC to", "over", "steps", "seconds", "CPU s", "of median steps", f"≤ {goal:g}"], rows)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet8", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4096, choices=GOALS, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--others", nargs="+", default=OTHERS, choices=OTHERS, help="(default: %(default)s)")
    parser.add_argument("--kfac", nargs="*", default=[], metavar="SETTING=VALUE", help="changes of K-FAC's settings")
    parser.add_argument("--sgd", nargs="*", default=[], metavar="SETTING=VALUE", help="changes of K-FAC's SGD")
    parser.add_argument("--float32", action="store_true", help="not in the tuned record's precision")
    arguments = parser.parse_args()
    tuned = json.loads((RESULTS / f"optimizers-{arguments.model}-{arguments.batch_size}.json").read_text())
    of_kfac, of_sgd = (
        {key: json.loads(value) for key, value in (word.split("=", 1) for word in words)}
        for words in (arguments.kfac, arguments.sgd)
    )
    precision = "off" if arguments.float32 else tuned["settings"]["precision"]

    def run_of(name: str, seed: int) -> Run:
        best = tuned["found"][name]["best"]
        optimizer, kfac = best["optimizer"], {}
        if name == "K-FAC":
            optimizer, kfac = optimizer | of_sgd, best["kfac"] | of_kfac
        return Run(arguments.model, arguments.batch_size, tuned["settings"]["epochs"], optimizer, kfac,
                   seed=seed, precision=precision)  # fmt: skip

    name = f"kfac-seconds-{arguments.model}-{arguments.batch_size}" + ("-float32" if arguments.float32 else "")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    done = Runs(name, vars(arguments) | {"targets": TARGETS})
    rounds = [{name: run_of(name, seed) for name in ("K-FAC", *arguments.others)} for seed in seeds]
    done.summary = lambda: summarise(done, rounds, GOALS[arguments.batch_size])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(done.do, (run for turn in rounds for run in turn.values())))
    summary = done.summary()
    print(report(summary["found"]), report_ratios(summary["shares"], summary["goal"]), sep="\n\n")
    print(done.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
