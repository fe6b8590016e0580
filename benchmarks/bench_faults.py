"""How soon does a training of two ranks end when one of them fails, whom does it blame, and what is lost?

    python -m benchmarks.bench_faults [--rounds 3] [--cap-s 300] [--only SYSTEM …] [--faults FAULT …]

ResNet-8 on Fashion-MNIST, two ranks on the processor: `trainer train`, started by torchrun and rank by rank as srun
does; a loop around DistributedDataParallel; Lightning; accelerate. A fault strikes some seconds into their second
epoch or a later one. It needs root, and ../shared/testbed, for hosts of their own and a small disk. Prints a table,
writes results/faults.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks import corpus
from benchmarks.fault_runs import POLL_S, Run, cell, find_blame, list_checkpoints, send
from benchmarks.fault_systems import BATCH_SIZE, NEEDS, OURS, RANK_TIMEOUT_S, SYSTEMS, Place
from benchmarks.measure import RESULTS, ROOT, WORK, command_line, environment, spread, table, write_record
from benchmarks.testbed import NETWORK as SWITCH
from benchmarks.testbed import hosts

NETWORK, SUBNET = "fb", "95.1"  # a network for each system: fb0, fb1, …
IMAGES = 12_000
START_S = 120.0  # until the first checkpoint
INTO_EPOCH_S = 2.0  # after a checkpoint, a fault strikes
DISK_BYTES, FULL_EPOCHS = 16 * 2**20, 2  # for how many epochs the disk is full: the checkpoints of two fail

CUT, FULL, HANG = "link of node2 cut", "disk full", "reads of rank 1 hang"


def to_rank_1(number: int) -> Callable[[Run, Path], None]:
    return lambda run, _: send(run.ranks()[1], number)


def terminate(run: Run, _: Path) -> None:
    """Ask whoever was started to end: a launcher, or each rank."""
    for pid in run.launchers:
        send(pid, signal.SIGTERM)


def warn_ranks(run: Run, _: Path) -> None:
    for pid in run.ranks():
        send(pid, signal.SIGUSR1)


def cut_link(run: Run, _: Path) -> None:
    subprocess.run([SWITCH, "link", run.network, "node2", "down"], check=True)


def fill_disk(_run: Run, folder: Path) -> None:
    with suppress(OSError), (folder / "disk" / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


FAULTS: dict[str, Callable[[Run, Path], None]] = {
    "SIGKILL to rank 1": to_rank_1(signal.SIGKILL),
    "SIGSTOP to rank 1": to_rank_1(signal.SIGSTOP),
    HANG: lambda _run, folder: (folder / "hang").touch(),
    CUT: cut_link,
    FULL: fill_disk,
    "SIGTERM to the launcher": terminate,
    "SIGUSR1 to all ranks": warn_ranks,
}
BLAMING = list(FAULTS)[:4]  # those of rank 1 alone
WAITING = BLAMING[1:]  # those of which most systems learn by a time-out, if at all


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def free_port() -> int:
    """Return a port on which nobody listens, below those that Linux gives to who connects; nor on the one below it."""
    while True:
        port = random.randrange(17_100, 30_000)
        with suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port - 1)):
            return port


def measure(fault: str, system: str, data: Path, cap_s: float) -> dict:
    """Train, have the fault strike, and wait until no process is left, or for `cap_s`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-", dir=WORK)))
        network = f"{NETWORK}{list(SYSTEMS).index(system)}" if fault == CUT else ""
        stack.enter_context(small_disk(folder / "disk") if fault == FULL else nullcontext())
        stack.enter_context(hosts(network, 2, SUBNET) if network else nullcontext())
        out = folder / "disk" / "run" if fault == FULL else folder / "run"
        commands = SYSTEMS[system](Place(data, out, free_port(), network))
        paths = [str(ROOT / "benchmarks" / "hanging"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths),
                     "HANG": str(folder / "hang")}  # fmt: skip
        run = stack.enter_context(Run(commands, folder, out, variables))
        started = run.wait_for(lambda: list_checkpoints(out), START_S)
        epoch_s = run.wait_for(partial(is_newer, out, time.time()), START_S) if fault == FULL and started else 0.0
        if started is None or epoch_s is None or run.wait_for(lambda: False, INTO_EPOCH_S) is not None:
            raise SystemExit(f"error: {system} has not trained:\n" + run.said())
        return {"start_s": started} | strike(fault, run, folder, cap_s, FULL_EPOCHS * epoch_s)


def is_newer(out: Path, than: float) -> bool:
    """Return whether there is a checkpoint that was written after a moment in seconds since 1970."""
    return any(written > than for written, _ in list_checkpoints(out))


def strike(fault: str, run: Run, folder: Path, cap_s: float, full_s: float) -> dict:
    """Have the fault strike, and wait for the end.

    Args:
        fault: Of FAULTS.
        run: What trains.
        folder: Of the run, with what faults need.
        cap_s: How long to wait.
        full_s: How long a disk stays full.

    Returns:
        When and how the run ended, whom it blames, and what a restart can begin with.
    """
    rank_1 = run.ranks()[1]
    run.begin_listening()
    struck = time.time()
    FAULTS[fault](run, folder)
    if fault == FULL and run.wait_for(lambda: False, full_s) is None:
        (folder / "disk" / "filler").unlink()
        run.wait_for(lambda: run.last_checkpoint() > struck + full_s, cap_s)
        if run.processes():
            return {"survived": True, "usable": run.last_checkpoint() > struck + full_s}
    others = run.wait_for(lambda: not run.processes().keys() - {rank_1}, cap_s)
    others_s = None if others is None else time.time() - struck
    gone = run.wait_for(lambda: False, max(POLL_S, struck + cap_s - time.time()))
    gone_s = None if gone is None else time.time() - struck
    saved = run.last_checkpoint()
    line = find_blame(run.said(is_apart=fault == CUT)) if fault in BLAMING else ""
    return {
        "survived": False,
        "usable": saved > 0,
        "gone_s": gone_s,
        "others_gone_s": others_s,
        "exit_codes": run.exit_codes(),
        "lost_s": max(0.0, struck - saved),
        "blames_rank_1": bool(line),
        "names_its_host": "node2" in line,
        "line": line.replace(socket.gethostname(), "this-host"),
    }


def compare_under(fault: str, systems: list[str], data: Path, rounds: int, cap_s: float) -> dict[str, dict]:
    """Measure the systems: all at once where most wait, else in turns. One that reaches the cap runs once."""
    runs: dict[str, list[dict]] = {system: [] for system in systems}

    def run_once(system: str) -> None:
        runs[system].append(measure(fault, system, data, cap_s))
        said = cell(summarise(runs[system][-1:]), cap_s)
        print(f"  {fault}, round {len(runs[system])} of {rounds}: {system}: {said}", flush=True)

    for _ in range(rounds):
        left = [system for system, its in runs.items() if all(run.get("gone_s", 0.0) is not None for run in its)]
        with ThreadPoolExecutor(len(systems) if fault in WAITING else 1) as pool:
            list(pool.map(run_once, left))
    return {system: summarise(its) for system, its in runs.items()}


def summarise(runs: list[dict]) -> dict:
    """Return what a system's runs under a fault have in common; seconds are None where no run has any in time."""
    its: dict = {"capped": sum(run.get("gone_s", 0.0) is None for run in runs)}
    its["survived"] = sum(run["survived"] for run in runs)
    for key in ("gone_s", "others_gone_s", "lost_s"):
        values = [run[key] for run in runs if run.get(key) is not None]
        its[key] = spread(values) if values else None
    for key in ("usable", "blames_rank_1", "names_its_host"):
        its[key] = all(run.get(key, False) for run in runs)
    codes = sorted({str(code) for run in runs for code in run.get("exit_codes", ()) if code is not None})
    return its | {"exit_codes": codes, "runs": runs}


def begin_record(settings: dict, is_new: bool) -> dict:
    """Return a record that has no faults yet, or the one that is there."""
    path = RESULTS / "faults.json"
    if is_new:
        return {"environments": {}, "peers": {}, "absent": {}, "settings": settings, "found": {}}
    record = json.loads(path.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"error: {path} has other settings; measure all faults again")
    return record


def main() -> int:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--cap-s", type=float, default=300, help="wait so long for the end (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", choices=SYSTEMS, help="some of them; no record")
    parser.add_argument(
        "--faults", nargs="+", metavar="FAULT", choices=FAULTS, help="measure these again, in the record"
    )
    arguments = parser.parse_args()
    described = environment()
    if os.geteuid() or not SWITCH.exists():
        raise SystemExit(f"error: this benchmark needs root, and {SWITCH}")
    settings = {"rounds": arguments.rounds, "cap_s": arguments.cap_s, "rank_timeout_s": RANK_TIMEOUT_S,
                "images": IMAGES, "batch_size": BATCH_SIZE, "into_epoch_s": INTO_EPOCH_S, "full_epochs": FULL_EPOCHS,
                "ours": OURS}  # fmt: skip
    record = begin_record(settings, is_new=bool(arguments.only) or not arguments.faults)
    there = [name for name in NEEDS.values() if importlib.util.find_spec(name)]
    record["peers"] = {name: metadata.version(name) for name in there}
    record["absent"] = {system: f"{name} is not installed" for system, name in NEEDS.items() if name not in there}
    systems = [system for system in arguments.only or SYSTEMS if system not in record["absent"]]
    data = corpus.fashion_mnist(IMAGES) / "tar"
    for fault in arguments.faults or FAULTS:
        record["found"][fault] = compare_under(fault, systems, data, arguments.rounds, arguments.cap_s)
        record["environments"][fault] = described
        if not arguments.only:
            write_record("faults", record)
    rows = [
        [fault, *(cell(its, arguments.cap_s) for its in by_system.values())]
        for fault, by_system in record["found"].items()
    ]
    print("\n" + table(["fault", *systems], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
