"""Does a loader that feeds a GPU's decoder keep the training thread from launching kernels?

    python -m benchmarks.bench_lock [--rounds 7] [--passes 15] [--images 1200] [--threads 4]

A thread calls the layers of a small ResNet-50 (see launch_times.py), each time for a batch, while the loader makes the
next: it reads 256 photographs, compares their checksums, and cuts windows out of them. It does so in Python, which
needs the interpreter's lock as the training thread does, or in C, without it. For comparison, the thread alone, and
beside as many threads that never need the lock, and only take the processor. Each is a process that stays; all take
turns. Writes results/lock.json.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

from benchmarks import corpus
from benchmarks.bench_reading import long_index
from benchmarks.launch_times import BATCH, PAUSE_S, SIZE
from benchmarks.measure import Child, column, command_line, environment, interleaved, table, write_record
from datapipe.images.recode import RecodeOptions
from datapipe.native import VARIABLE
from datapipe.packing import PackOptions

ALONE, SUMMING = "alone", "beside threads without the lock"
IN_PYTHON, IN_C = "beside cutting in Python", "beside cutting in C"
MARKED = ", --restart 8"
SAMPLES = 102_400  # of an epoch, so that none ends: the same images again and again
WAYS = {  # what works beside the thread, the data set, and DATAPIPE_NATIVE
    ALONE: ("nothing", "tar", "1"),
    SUMMING: ("summing", "tar", "1"),
    IN_PYTHON: ("cutting", "tar", "0"),
    IN_C: ("cutting", "tar", "1"),
    IN_PYTHON + MARKED: ("cutting", "restart8", "0"),
    IN_C + MARKED: ("cutting", "restart8", "1"),
}


def niceness() -> dict[str, int | str]:
    """Return this process's, and that of its session where the kernel groups processes by session (sched(7))."""
    group = Path("/proc/self/autogroup")
    return {"process": os.nice(0), "session": group.read_text().split()[-1] if group.exists() else "none"}


def describe(runs: list[dict]) -> dict:
    """Return the spread of each figure over all passes of a way, with tenths, and the medians of each turn."""
    passes = list(chain.from_iterable(run["passes"] for run in runs))
    figures = {}
    for name in passes[0]:
        tenths = quantiles((its[name] for its in passes), n=10)
        figures[name] = column(passes, name) | {"tenth": tenths[0], "nine_tenths": tenths[-1]}
    turns = [{name: median(its[name] for its in run["passes"]) for name in figures} for run in runs]
    return figures | {"turns": turns}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--passes", type=int, default=15, help="in each turn (default: %(default)s)")
    parser.add_argument("--images", type=int, default=1200, help="photographs (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="of the loader (default: %(default)s)")
    options = parser.parse_args(arguments)

    described = environment()
    folder = corpus.photographs(options.images)
    corpus.packed_as(folder, "tar", PackOptions(format="tar", shard_mib=64))
    corpus.packed_as(folder, "restart8", PackOptions(recode=RecodeOptions(restart=8)))
    folders = {name: long_index(folder / name / "train", SAMPLES, f"long-{name}") for name in ("tar", "restart8")}
    with ExitStack() as stack:
        children = {}
        for way, (beside, name, setting) in WAYS.items():
            words = ["-m", "benchmarks.launch_times", beside, str(folders[name]), str(options.threads)]
            command = ["env", f"{VARIABLE}={setting}", sys.executable, *words]
            children[way] = stack.enter_context(Child(way, command))
            children[way].ask(2)
        runs = interleaved(list(WAYS), options.rounds, lambda way, _: children[way].ask(options.passes))
    ways = {way: describe(its) for way, its in runs.items()}
    rows = []
    for way, its in ways.items():
        launch = its["launch_ms"]
        span = f"{launch['median']:.1f} ({launch['tenth']:.1f}–{launch['nine_tenths']:.1f})"
        rest = (launch["max"], its["launch_cpu_ms"]["median"], its["wait_ms"]["median"])
        rows.append([way, span, *(f"{milliseconds:.1f}" for milliseconds in rest)])
    print("\n" + table(["launching", "ms", "at most", "CPU ms", "waiting ms"], rows))
    print("Medians of all passes (a tenth is below, a tenth above).")
    record = {
        "environment": described,
        "corpus": corpus.describe(folder),
        "settings": {
            "rounds": options.rounds,
            "passes": options.passes,
            "threads": options.threads,
            "pause_s": PAUSE_S,
            "niceness": niceness(),
            "batch": BATCH,
            "size": SIZE,
        },
        "ways": ways,
    }
    print(write_record("lock", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
