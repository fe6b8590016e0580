"""What does an exchange of four nodes cost when one of them is lost in the middle?

    python -m benchmarks.bench_losses [--count 6000] [--rounds 5] [--mbps 50] [--only FAULT ...]

Photographs in tar shards, on a FUSE filesystem whose reads, those of all hosts together, share a bandwidth, and of
which nothing is cached; four hosts (network namespaces) stage them. When a third has landed, one node is killed, is
stopped, loses its network, or finds its disk full; the network's loss ends its process as well, since the filesystem is
not lost with it here. It needs root, and ../shared/testbed. Measured are the nodes that are left: how long until all of
them have named the lost one, until all are staged, and what was read from the filesystem in all. Prints a table, writes
results/losses.json.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import corpus
from benchmarks.bench_stage import SHARD_MIB
from benchmarks.measure import (
    ROOT,
    WORK,
    command_line,
    environment,
    interleaved,
    shown,
    summarise,
    table,
    write_record,
)
from benchmarks.testbed import NETWORK as SWITCH
from benchmarks.testbed import SlowMount, hosts, on_host
from datapipe.dataset.manifest import Manifest
from datapipe.packing import PackOptions, pack

NUM_NODES, NETWORK, SUBNET, MASTER = 4, "dplost", "93.8", "node1"
TIMEOUT_S = 10  # of a node that does not answer
SPARE = 1.5  # times the data set, free on the disk of a node
NONE = "none"
NAMED = re.compile(r"WARNING (node \d+ \(\S+\) .*?): \d nodes exchange without it")
POLL_S = 0.05


class Staging:
    """`datapipe stage` on four hosts.

    Args:
        source: The data set, as all see it.
        disks: The folder of each, which is a filesystem of its own.
    """

    def __init__(self, source: Path, disks: list[Path]) -> None:
        self.disks = disks
        self._logs = [disk.parent / f"{disk.name}.log" for disk in disks]
        self.children = []
        for number, disk in enumerate(disks):
            line = [sys.executable, "-m", "datapipe", "stage", source, disk / "copy", "--json", "--master", MASTER]
            line += ["--node", f"{number}/{NUM_NODES}", "--timeout", str(TIMEOUT_S)]
            words = [*on_host(NETWORK, number + 1), *map(str, line)]
            with self._logs[number].open("w") as log:
                self.children.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT))

    def landed_bytes(self) -> int:
        """Return what has landed at the first node."""
        paths = [path for path in (self.disks[0] / "copy").glob("*") if not path.name.endswith(".landed")]
        paths += (self.disks[0] / "copy").glob(".*.partial")
        return sum(path.stat().st_blocks * 512 for path in {*paths} if path.exists())

    def pid_of(self, number: int) -> int:
        """Return the process that stages on a host, below what enters its network."""
        pid = self.children[number].pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid

    def named(self, number: int) -> str:
        """Return whom a node has named as lost, and why."""
        match = NAMED.search(self._logs[number].read_text())
        return match[1] if match else ""

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self._logs)


def fill(disk: Path) -> None:
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def cut(staging: Staging, number: int) -> None:
    subprocess.run([SWITCH, "link", NETWORK, f"node{number + 1}", "down"], check=True)
    os.kill(staging.pid_of(number), signal.SIGKILL)  # no word of that reaches the others


FAULTS: dict[str, Callable[[Staging, int], object]] = {
    NONE: lambda *_: None,
    "SIGKILL": lambda staging, number: os.kill(staging.pid_of(number), signal.SIGKILL),
    "SIGSTOP": lambda staging, number: os.kill(staging.pid_of(number), signal.SIGSTOP),
    "network cut": cut,
    "disk full": lambda staging, number: fill(staging.disks[number]),
}
VICTIMS = {"process 0": 0, "another": 2}


@contextmanager
def disks(folder: Path, size_bytes: int) -> Iterator[list[Path]]:
    """Have a disk for each node, for a block: in memory, with room for a copy."""
    paths = [folder / f"disk-{number}" for number in range(NUM_NODES)]
    try:
        for path in paths:
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(SPARE * size_bytes)}", "tmpfs", path], check=True)
        yield paths
    finally:
        for path in paths:
            subprocess.run(["umount", "--lazy", path], check=False)


def lose(mount: SlowMount, folder: Path, size_bytes: int, fault: str, victim: int) -> dict[str, float]:
    """Stage to four nodes, of which one is lost. Seconds from the start; `named_s` and `rest_s` from the fault on."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with disks(folder, size_bytes) as paths, mount.counted() as counted:
        began = time.perf_counter()
        staging = Staging(mount.path / "data", paths)
        try:
            while staging.landed_bytes() < size_bytes / 3:
                if any(child.poll() for child in staging.children):
                    raise SystemExit(f"error: a node has failed:\n{staging.said()}")
                time.sleep(POLL_S)
            struck = time.perf_counter()
            FAULTS[fault](staging, victim)
            left = [number for number in range(NUM_NODES) if fault == NONE or number != victim]
            named = {}
            while any(staging.children[number].poll() is None for number in left):
                for number in left:
                    if number not in named and staging.named(number):
                        named[number] = time.perf_counter()
                time.sleep(POLL_S)
            ended = time.perf_counter()
            if any(staging.children[number].returncode for number in left):
                raise SystemExit(f"error: {fault}: a node that is left has failed:\n{staging.said()}")
            if fault != NONE and {*named} != {*left}:
                raise SystemExit(f"error: {fault}: nodes do not name the lost one:\n{staging.said()}")
        finally:
            for number, child in enumerate(staging.children):
                if child.poll() is None:
                    with suppress(ProcessLookupError, FileNotFoundError):
                        os.kill(staging.pid_of(number), signal.SIGKILL)
                    child.wait()
            subprocess.run([SWITCH, "link", NETWORK, f"node{victim + 1}", "up"], check=True)
    figures = {"wall_s": ended - began, "read_bytes": counted["read_bytes"]}
    if fault != NONE:
        figures |= {"named_s": max(named.values()) - struck, "spread_s": max(named.values()) - min(named.values())}
        figures["without_naming_s"] = figures["wall_s"] - figures["named_s"]
    return figures


def report(figures: dict[str, dict], size_bytes: int) -> str:
    undisturbed, rows = figures[NONE]["wall_s"]["median"], []
    for name, its in figures.items():
        seconds = [shown(its[key], 1) if key in its else "" for key in ("wall_s", "named_s", "spread_s")]
        rest = its.get("without_naming_s", its["wall_s"])["median"] / undisturbed
        rows.append([name, *seconds, f"{rest:.2f}", f"{its['read_bytes']['median'] / size_bytes:.3f}"])
    return table(["lost", "wall s", "named after s", "by all within s", "rest ÷ undisturbed", "read ÷ data"], rows)


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=5)
    parser.add_argument("--mbps", type=float, default=50, help="of the shared filesystem (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="some faults; no record")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it unmounts then, too
    images = corpus.photographs(arguments.count)
    WORK.mkdir(parents=True, exist_ok=True)
    cases = {NONE: (NONE, 0)}
    for fault in arguments.only or FAULTS:
        cases |= {f"{fault}, {name}": (fault, victim) for name, victim in VICTIMS.items() if fault != NONE}
    with tempfile.TemporaryDirectory(prefix="losses-", dir=WORK) as work, hosts(NETWORK, NUM_NODES, SUBNET):
        backing, size = Path(work) / "backing", 0
        pack(images / "images" / "train", Path(work) / "packed", PackOptions(shard_mib=SHARD_MIB))
        backing.mkdir()
        (Path(work) / "packed" / "train").rename(backing / "data")
        size = Manifest.read(backing / "data").size_bytes
        with SlowMount(backing, WORK / f"slow-{os.getpid()}", direct=True, read_mbps=arguments.mbps) as mount:
            folder = Path(work) / "nodes"
            runs = interleaved(cases, arguments.rounds, lambda name, _: lose(mount, folder, size, *cases[name]))
    figures = {name: summarise(its) for name, its in runs.items()}
    settings = {
        "nodes": NUM_NODES,
        "mbps": arguments.mbps,
        "shard_mib": SHARD_MIB,
        "bytes": size,
        "timeout_s": TIMEOUT_S,
    }
    print("\n" + report(figures, size) + "\n", flush=True)
    if not arguments.only:
        record = {"environment": environment(), "rounds": arguments.rounds, "corpus": corpus.describe(images)}
        print(write_record("losses", {**record, "settings": settings, "lost": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
