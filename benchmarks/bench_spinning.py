"""What does it bring that the trainer's threads sleep, and do not spin, while they wait for each other?

    python -m benchmarks.bench_spinning [--rounds 9] [--images 12000]

ResNet-8 on Fashion-MNIST with the loader behind it, two threads each, on two cores of which another process takes one,
and again without that process. `trainer train` as it is sets OMP_WAIT_POLICY=PASSIVE; where torch is loaded before,
that comes too late, and torch's threads wait as they do by default. Every run is a process of its own; the runs
alternate. Prints a table, writes results/spinning.json.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import WORK, command_line, compare, cpu_s, environment, process, shown, table, write_record

RECIPE = "fashion-mnist-resnet8"
SETTINGS = ("train.epochs=1", "train.target_accuracy=none", "data.threads=2")
TRAINER = "import sys; from trainer.cli import app; app(sys.argv[1:])"
PROGRAMS = {"threads spin": f"import torch; {TRAINER}", "threads sleep": TRAINER}
BUSY = "while True: pass"
CORES = 0, 1  # the trainer's; the first is the one that may be taken
STATES = "one core taken", "no core taken"
FIGURES = ("images_per_s", "wait_share", "process_wall_s", "process_cpu_s")


def train(program: str, data: Path, is_core_taken: bool) -> dict:
    """Train once in a fresh folder: what its metrics say, what the process took, and what all others took meanwhile."""
    out = WORK / "runs" / "spinning"
    shutil.rmtree(out, ignore_errors=True)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ["train", RECIPE, "--data", str(data), "--out", str(out), *settings]
    command = ["taskset", "-c", ",".join(map(str, CORES)), sys.executable, "-c", program, *words]
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    busy_s, own_s = machine_cpu_s(), cpu_s()
    with ExitStack() as stack:
        if is_core_taken:
            busy = stack.enter_context(subprocess.Popen(["taskset", "-c", str(CORES[0]), sys.executable, "-c", BUSY]))
            stack.callback(busy.kill)
        _, seconds = process(command, env=unset)
    others_s = machine_cpu_s() - busy_s - (cpu_s() - own_s)
    end = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: end[key] for key in ("images_per_s", "wait_share", "accuracy")} | seconds | {"others_cpu_s": others_s}


def machine_cpu_s() -> float:
    """CPU seconds of all processes since the machine started, from /proc/stat (proc(5))."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--images", type=int, default=12_000, help="to train on (default: %(default)s)")
    arguments = parser.parse_args()

    described = environment()
    folder = corpus.fashion_mnist(arguments.images)
    ways = {f"{state}, {name}": (state, program) for state in STATES for name, program in PROGRAMS.items()}

    def run(way: str, _: int) -> dict:
        state, program = ways[way]
        return train(program, folder / "tar", state == STATES[0])

    figures = compare(list(ways), arguments.rounds, run, FIGURES)
    header = ["Fashion-MNIST, ResNet-8", "images/s", "wall s", "CPU s"]
    columns = ("images_per_s", "process_wall_s", "process_cpu_s")
    print("\n" + table(header, [[way, *(shown(figures[way][key]) for key in columns)] for way in ways]) + "\n")
    ratios = {}
    for state in STATES:
        runs = [figures[f"{state}, {name}"]["runs"] for name in PROGRAMS]
        spinning, sleeping = ([run["images_per_s"] for run in program] for program in runs)
        ratios[state] = [slept / spun for slept, spun in zip(sleeping, spinning, strict=True)]
        print(f"{state}: {statistics.median(ratios[state]):.2f} × the images/s with threads that sleep")
    print("Medians (smallest–largest) over the runs; of the ratios, over the rounds.")
    record = {
        "environment": described,
        "corpus": corpus.describe(folder),
        "recipe": RECIPE,
        "settings": SETTINGS,
        "rounds": arguments.rounds,
        "ways": figures,
        "ratios": ratios,
    }
    print(write_record("spinning", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
