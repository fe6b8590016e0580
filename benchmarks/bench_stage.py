"""How fast is a packed data set copied to a local disk, and to those of four nodes from a shared filesystem?

    python -m benchmarks.bench_stage [--count 6000] [--rounds 5] [--mbps 60] [--only local|nodes]

Photographs in tar shards. *local*: from the page cache to a RAM disk and to this machine's disk, beside programs that
copy; the disk is synced at the end of each. *nodes*: four hosts (network namespaces) copy from a FUSE filesystem whose
reads, those of all hosts together, share a bandwidth; nothing is cached. That needs root, and ../shared/testbed, which
makes both. All take turns. Prints tables, writes results/stage.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import ROOT, WORK, command_line, compare, cpu_s, environment, shown, table, write_record
from datapipe.dataset.manifest import Manifest, find_data_sets

TESTBED = ROOT.parent / "shared" / "testbed"
NUM_NODES, NETWORK, MASTER = 4, "dpbench", "node1"
OURS = "datapipe stage"
STAGE = [sys.executable, "-m", "datapipe", "stage"]
# What copies a folder FROM to TO, which does not exist.
COPIERS: dict[str, list[str]] = {
    OURS: [*STAGE, "FROM", "TO", "--json"],
    "cp -r": ["cp", "-r", "FROM", "TO"],
    "rsync -a": ["rsync", "-a", "FROM/", "TO"],
    "tar | tar": ["sh", "-c", "mkdir TO && tar -C FROM -cf - . | tar -C TO -xf -"],
}
ON_NODES = {
    "datapipe stage, exchange": [*STAGE, "FROM", "TO", "--json", "--master", MASTER],
    "datapipe stage, copy": [*STAGE, "FROM", "TO", "--json", "--mode", "copy"],
    "cp -r on each": ["cp", "-r", "FROM", "TO"],
}
FIGURES = ("wall_s", "process_wall_s", "cpu_s")


def filled(command: list[str], source: Path, target: Path) -> list[str]:
    return [word.replace("FROM", str(source)).replace("TO", str(target)) for word in command]


def copy_locally(command: list[str], source: Path, target: Path) -> dict[str, float]:
    """Copy once. `wall_s`: of ours without the start of Python and its imports; `process_wall_s`: with them."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began, cpu_began = time.perf_counter(), cpu_s()
    output = subprocess.run(filled(command, source, target), check=True, stdout=subprocess.PIPE, text=True).stdout
    synced = time.perf_counter()
    subprocess.run(["sync", "-f", target], check=True)
    sync_s = time.perf_counter() - synced
    wall_s = time.perf_counter() - began
    own_s = json.loads(output)["seconds"] + sync_s if output.startswith("{") else wall_s
    return {"wall_s": own_s, "process_wall_s": wall_s, "cpu_s": cpu_s() - cpu_began}


@contextmanager
def four_hosts(source: Path, place: Path, mbps: float) -> Iterator[Path]:
    """Hosts node1 to node4, and a slow view of a folder, at the path that is yielded."""
    mount, network = TESTBED / "slowfs-mount.sh", TESTBED / "netns-hosts.sh"
    if not mount.exists():
        raise SystemExit(f"error: nodes: needs {TESTBED}, which makes hosts and a slow filesystem")
    path = place / "slow"
    subprocess.run([network, "up", NETWORK, str(NUM_NODES)], check=True)
    try:
        line = [mount, source, path, "--direct", "--read-mbps", str(mbps)]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)  # no pipe: its daemon would keep it open
        try:
            yield path
        finally:
            subprocess.run([mount, "-u", path], check=True)
    finally:
        subprocess.run([network, "down", NETWORK], check=True)


def copy_to_nodes(command: list[str], source: Path, place: Path) -> dict[str, float]:
    """Copy to a folder of each node once. `wall_s`: until the last node is done, starts and imports included."""
    control = source / ".slowfs"
    control.write_text(json.dumps({"reset": True}))
    targets = [place / f"local-{i}" for i in range(NUM_NODES)]
    for target in targets:
        shutil.rmtree(target, ignore_errors=True)
    began, cpu_began = time.perf_counter(), cpu_s()
    children = []
    for i, target in enumerate(targets):
        words = filled(command, source / "data", target)
        words += ["--node", f"{i}/{NUM_NODES}"] if words[: len(STAGE)] == STAGE else []
        host = [TESTBED / "netns-hosts.sh", "exec", NETWORK, f"node{i + 1}"]
        children.append(subprocess.Popen([*host, *words], stdout=subprocess.DEVNULL, cwd=ROOT))
    if any([child.wait() for child in children]):
        raise SystemExit(f"error: {command} failed")
    figures = {"wall_s": time.perf_counter() - began, "cpu_s": cpu_s() - cpu_began}
    return figures | {"read_bytes": json.loads(control.read_text())["read_bytes"]}


def local(source: Path, place: Path, rounds: int) -> dict:
    target = place / "copy"
    run: Callable[[str, int], dict] = lambda name, _: copy_locally(COPIERS[name], source, target)  # noqa: E731
    figures = compare([name for name in COPIERS if shutil.which(COPIERS[name][0])], rounds, run, FIGURES)
    shutil.rmtree(target)
    return figures


def report(title: str, figures: dict[str, dict], size_bytes: int) -> str:
    rows = []
    for name, its in figures.items():
        speed = size_bytes / 1e6 / its["wall_s"]["median"]
        ratio = figures["cp -r"]["wall_s"]["median"] / its["wall_s"]["median"] if "cp -r" in figures else None
        rows.append(
            [name, f"{speed:,.0f}", shown(its["wall_s"], 2), shown(its["cpu_s"], 2), f"{ratio:.2f}" if ratio else ""]
        )
    return table([title, "MB/s", "wall s", "CPU s", "of cp's speed"], rows)


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=5)
    parser.add_argument(
        "--mbps", type=float, default=60, help="bandwidth of the shared filesystem (default: %(default)s)"
    )
    parser.add_argument("--only", choices=["local", "nodes"], help="one section; no record")
    arguments = parser.parse_args()
    described = environment()
    packed = corpus.packed(corpus.photographs(arguments.count)) / "tar"
    size_bytes = sum(Manifest.read(folder).size_bytes for folder in find_data_sets(packed))
    record = {
        "environment": described,
        "corpus": {"images": arguments.count, "bytes": size_bytes},
        "rounds": arguments.rounds,
    }
    with (
        tempfile.TemporaryDirectory(prefix="stage-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir=WORK) as disk,
    ):
        if arguments.only != "nodes":
            for name, place in (("RAM disk", Path(memory)), ("disk", Path(disk))):
                source = shutil.copytree(packed, place / "source")
                record[name] = local(source, place, arguments.rounds)
                print("\n" + report(name, record[name], size_bytes) + "\n")
        if arguments.only != "local":
            place = Path(memory) / "nodes"
            shutil.copytree(packed, place / "backing" / "data")
            with four_hosts(place / "backing", place, arguments.mbps) as slow:
                keys = ("wall_s", "cpu_s", "read_bytes")
                run: Callable[[str, int], dict] = lambda name, _: copy_to_nodes(ON_NODES[name], slow, place)  # noqa: E731
                record["nodes"] = compare(list(ON_NODES), arguments.rounds, run, keys)
            record["settings"] = {
                "nodes": NUM_NODES,
                "mbps": arguments.mbps,
                "floor_s": size_bytes / arguments.mbps / 1e6,
            }
            rows = [
                [name, shown(its["wall_s"], 1), f"{its['wall_s']['median'] / record['settings']['floor_s']:.2f}",
                 f"{its['read_bytes']['median'] / size_bytes:.3f}", shown(its["cpu_s"], 1)]
                for name, its in record["nodes"].items()
            ]  # fmt: skip
            print("\n" + table(["four nodes", "wall s", "÷ data ÷ bandwidth", "read ÷ data", "CPU s"], rows) + "\n")
    if not arguments.only:
        print(write_record("stage", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
