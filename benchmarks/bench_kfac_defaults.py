"""How many more steps does K-FAC need with its defaults than with settings that were tuned?

    python -m benchmarks.bench_kfac_defaults [--seeds 3] [--float32]

Trains as bench_optimizers does, with K-FAC's own defaults, on each of its records: their K-FAC is that of the best of
many trials. The learning rate of 0.1 is theirs, too. The same seeds are compared; with `--float32`, which is not the
precision of those records, the tuned settings train again. Two trainings run at a time. Writes
results/kfac-defaults.json, or kfac-defaults-float32.json, after every training, and does none again that is there.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from statistics import mean

from benchmarks.bench_optimizers import Runs, paired_ratio, reached
from benchmarks.measure import RESULTS, command_line, table
from benchmarks.optimizer_run import TARGETS, Run
from trainer.kfac.settings import KFACSettings

RECORDS = tuple((model, batch_size) for batch_size in (512, 4096) for model in ("resnet8", "resnet20"))
SETTINGS = ("damping", "kl_clip", "factor_decay", "factor_update_steps", "inv_update_steps", "factor_fraction")
GOAL = 1.1  # of the steps with tuned settings


def compare(defaults: list[list[dict]], tuned: list[list[dict]], target: float) -> dict | None:
    """Return the steps to a target with the defaults and with tuned settings, and their ratio.

    Args:
        defaults: What each seed's evaluations found.
        tuned: The same with tuned settings.
        target: The accuracy.

    Returns:
        The mean steps of both, and the geometric mean of the seeds' ratios with its 95 % interval; None where a seed
        misses the target.
    """
    pairs = [(reached(mine, target), reached(its, target)) for mine, its in zip(defaults, tuned, strict=True)]
    if any(None in pair for pair in pairs):
        return None
    ours, theirs = zip(*pairs, strict=True)
    ratio, ends = paired_ratio(ours, theirs, "step")
    steps = {name: mean(line["step"] for line in lines) for name, lines in (("defaults", ours), ("tuned", theirs))}
    return steps | {"ratio": ratio, "interval": ends}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--float32", action="store_true", help="not in the tuned records' precision")
    arguments = parser.parse_args()
    done = Runs(
        "kfac-defaults" + ("-float32" if arguments.float32 else ""),
        vars(arguments) | {"targets": TARGETS, "goal": GOAL},
    )
    defaults = {name: asdict(KFACSettings())[name] for name in SETTINGS}  # in the record, so that others make new runs
    pairs: dict[str, list[tuple[Run, Run]]] = {}  # with the defaults, and tuned
    known: list[dict] = []  # runs of other records
    for model, batch_size in RECORDS:
        record = json.loads((RESULTS / f"optimizers-{model}-{batch_size}.json").read_text())
        best, precision = record["found"]["K-FAC"]["best"], record["settings"]["precision"]
        as_tuned = Run(model, batch_size, record["settings"]["epochs"], best["optimizer"], best["kfac"],
                       precision="off" if arguments.float32 else precision)  # fmt: skip
        known += [] if arguments.float32 else record["runs"]
        turns = [replace(as_tuned, seed=seed) for seed in range(1, 1 + arguments.seeds)]
        pairs[f"{model}, {batch_size}"] = [(replace(run, kfac=defaults), run) for run in turns]

    def evaluations(run: Run) -> list[dict] | None:
        if run in done:
            return done[run]
        return next((its["found"] for its in known if its["run"] == asdict(run)), None)

    def summarise() -> dict:
        shares = {}
        for name, of_seeds in pairs.items():
            results = [(evaluations(ours), evaluations(theirs)) for ours, theirs in of_seeds]
            whole = [both for both in results if None not in both]
            if whole:
                shares[name] = {
                    f"{target:.2f}": compare(*map(list, zip(*whole, strict=True)), target) for target in TARGETS
                }
        return {"found": shares}

    done.summary = summarise
    with ThreadPoolExecutor(2) as pool:
        runs = [run for turn in zip(*pairs.values(), strict=True) for pair in turn for run in pair]
        list(pool.map(done.do, (run for run in runs if evaluations(run) is None)))
    rows = []
    for name, by_target in summarise()["found"].items():
        for target, its in by_target.items():
            cells = ["missed", "", "", "no"]
            if its is not None:
                ends = " ({:.2f}–{:.2f})".format(*its["interval"]) if its["interval"] else ""
                met = "yes" if its["ratio"] <= GOAL else "no"
                cells = [f"{its['defaults']:.0f}", f"{its['tuned']:.0f}", f"{its['ratio']:.2f}{ends}", met]
            rows.append([name, f"{float(target):.0%}", *cells])
    print(table(["K-FAC on", "to", "steps", "tuned", "ratio", f"≤ {GOAL}"], rows))
    print(done.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
