"""How fast is a packed data set copied to a local disk, and to those of four nodes from a shared filesystem?

    python -m benchmarks.bench_stage [--count 6000] [--times 2] [--rounds 3] [--mbps 100] [--only local|nodes|scale]

Photographs in tar shards. *local*: from the page cache to a RAM disk and to this machine's disk, beside programs that
copy; the disk is synced at the end of each. *nodes*: four hosts (network namespaces) copy each photograph `--times`
times from a FUSE filesystem whose reads, those of all hosts together, share a bandwidth; nothing is cached. Beside ours
`cp` on each host, and Slurm's `sbcast` to them. That needs root, and ../shared/testbed, which makes all of it. *scale*:
what 1,024 nodes would read and send, by the functions that plan. All take turns. Prints tables, writes
results/stage.json.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import (
    RAM_DISK,
    ROOT,
    WORK,
    command_line,
    compare,
    cpu_s,
    environment,
    interleaved,
    process,
    shown,
    summarise,
    table,
    write_record,
)
from benchmarks.stage_plans import BATCH, RANKS_PER_NODE, WAYS
from benchmarks.testbed import TESTBED, SlowMount, hosts, on_host
from datapipe.dataset.manifest import Manifest
from datapipe.fsio import mounted_as
from datapipe.packing import PackOptions, pack

NUM_NODES, NETWORK, SUBNET, MASTER, PORT = 4, "dpbench", "93.6", "node1", "17400"
SHARD_MIB = 64
OURS = "datapipe stage"
STAGE = [sys.executable, "-m", "datapipe", "stage"]
# As if what was written were not read back and compared: every checksum is what is expected.
UNCHECKED = """
import sys
from unittest.mock import ANY
from datapipe.cli import main
from datapipe.staging import partial_file
partial_file.checksum = lambda *_: ANY
sys.exit(main())
"""
# What copies a folder FROM to TO, which does not exist.
COPIERS: dict[str, list[str]] = {
    OURS: [*STAGE, "FROM", "TO", "--json"],
    f"{OURS}, not checked": [sys.executable, "-c", UNCHECKED, "stage", "FROM", "TO", "--json"],
    "cp -r": ["cp", "-r", "FROM", "TO"],
    "rsync -a": ["rsync", "-a", "FROM/", "TO"],
    "tar | tar": ["sh", "-c", "mkdir TO && tar -C FROM -cf - . | tar -C TO -xf -"],
    "dcp": ["dcp", "FROM", "TO"],  # of mpiFileUtils
    "msrsync": ["msrsync", "-p", "2", "FROM/", "TO"],
}
CP, SBCAST, BLOCKS = "cp -r on each", "Slurm's sbcast", "datapipe, unstaged, blocks"
ON_NODES: dict[str, list[str]] = {
    "datapipe stage, exchange": [*STAGE, "FROM", "TO", "--json", "--master", MASTER],
    "datapipe stage, copy": [*STAGE, "FROM", "TO", "--json", "--mode", "copy"],
    CP: ["cp", "-r", "FROM", "TO"],
    SBCAST: [],  # one command for all nodes: see Nodes
    BLOCKS: [],
}
# Node NODE of several, at the end of its copy: when that was, and when a loader's first batch came.
FIRST_BATCH = """
import time
copied = time.perf_counter()
import json, os, sys
from datapipe.loaders import open_loader
folder, order, batch, node, nodes = sys.argv[1:]
node = node if node.isdecimal() else os.environ[node]
with open_loader(folder, int(batch), order=order, rank=int(node), world_size=int(nodes), threads=1) as loader:
    next(iter(loader))
    print(json.dumps({"copied": copied, "first_batch": time.perf_counter()}))
"""
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
FIGURES = ("wall_s", "process_wall_s", "cpu_s")
SCALE_SAMPLES, SCALE_NODES = (1_281_167, 1_000_000_000), 1024
# Of a cluster, in bytes per second: its shared filesystem, a node's network of 200 Gbit/s, its disk as it writes.
SHARED_BPS, NETWORK_BPS, DISK_BPS = 500e9, 25e9, 5e9
DISK_BYTES = 7.68e12  # of a node's disk


def filled(command: list[str], source: Path, target: Path) -> list[str]:
    return [word.replace("FROM", str(source)).replace("TO", str(target)) for word in command]


# --- local ---


def copy_locally(command: list[str], source: Path, target: Path) -> dict[str, float]:
    """Copy once. `wall_s`: of ours without the start of Python and its imports; `process_wall_s`: with them.

    What is measured is the second of two copies: what the first one takes depends on how the program before it has left
    the memory, by a factor of up to two.
    """
    for _ in range(2):
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        began, cpu_began = time.perf_counter(), cpu_s()
        done = subprocess.run(filled(command, source, target), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {command} ended with exit code {done.returncode}: {done.stderr}")
    output = done.stdout
    synced = time.perf_counter()
    subprocess.run(["sync", "-f", target], check=True)
    sync_s = time.perf_counter() - synced
    wall_s = time.perf_counter() - began
    own_s = json.loads(output)["seconds"] + sync_s if output.startswith("{") else wall_s
    return {"wall_s": own_s, "process_wall_s": wall_s, "cpu_s": cpu_s() - cpu_began}


def local(source: Path, place: Path, rounds: int) -> dict[str, dict]:
    """Copy a data set to another folder of the same disk, by each program that is installed."""
    target = place / "copy"
    names = [name for name, command in COPIERS.items() if shutil.which(command[0])]
    figures = compare(names, rounds, lambda name, _: copy_locally(COPIERS[name], source, target), FIGURES)
    shutil.rmtree(target)
    return figures


def report_local(title: str, figures: dict[str, dict], size_bytes: int) -> str:
    rows = []
    for name, its in figures.items():
        speed = size_bytes / 1e6 / its["wall_s"]["median"]
        ratio = figures["cp -r"]["wall_s"]["median"] / its["wall_s"]["median"]
        seconds = (shown(its[key], 2) for key in FIGURES)
        rows.append([name, f"{speed:,.0f}", *seconds, f"{ratio:.2f}"])
    return table([title, "MB/s", "wall s", "with start", "CPU s", "of cp's speed"], rows)


# --- nodes ---


@dataclass(frozen=True)
class Nodes:
    """Four hosts that see `data` on a slow filesystem, and have a folder each below `place`.

    `mount`: without a page cache, so that no host gets what another has read; `mapped`: the same with one, for who maps
    files into memory, which needs that: sbcast reads everything once, and ranks of a loader read different blocks.
    `slurm`: the folder of a Slurm whose nodes they are, or None.
    """

    mount: SlowMount
    mapped: SlowMount
    place: Path
    slurm: Path | None

    def run(self, name: str, _round: int) -> dict[str, float]:
        """Copy to each node, and load a first batch there. Seconds from the start to the last node, imports included.

        `wall_s`: to the end of the copy, and `own_s` the same of ours without imports; `first_batch_s`.
        """
        targets = [self.place / f"local-{i}" for i in range(NUM_NODES)]
        for target in targets:
            shutil.rmtree(target, ignore_errors=True)
        mount = self.mapped if name in (SBCAST, BLOCKS) else self.mount
        data = mount.path / "data"
        cpu_began, began = cpu_s(), time.perf_counter()
        with mount.counted() as counted:
            lines = self._broadcast(data) if name == SBCAST else self._on_each(name, data, targets)
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        figures = {"read_bytes": counted["read_bytes"], "server_cpu_s": counted["server_cpu_s"]}
        if name != SBCAST:  # whose work Slurm's own processes do
            figures["cpu_s"] = cpu_s() - cpu_began
        ended = [answer for answer in answers if "first_batch" in answer]
        if len(ended) != NUM_NODES:
            raise SystemExit(f"error: {name}: {len(ended)} of {NUM_NODES} nodes had a batch:\n" + "\n".join(lines))
        figures["first_batch_s"] = max(answer["first_batch"] for answer in ended) - began
        if name != BLOCKS:
            figures["wall_s"] = max(answer["copied"] for answer in ended) - began
            own = [answer["seconds"] for answer in answers if "seconds" in answer]
            figures["own_s"] = max(own, default=figures["wall_s"])
        return figures

    def _on_each(self, name: str, data: Path, targets: list[Path]) -> list[str]:
        children = []
        for i, target in enumerate(targets):
            words = filled(ON_NODES[name], data, target)
            words += ["--node", f"{i}/{NUM_NODES}"] if words[: len(STAGE)] == STAGE else []
            folder, order = (data, "blocks") if name == BLOCKS else (target, "full")
            loading = [sys.executable, "-c", FIRST_BATCH, str(folder), order, str(BATCH), str(i), str(NUM_NODES)]
            script = " && ".join(shlex.join(command) for command in (words, loading) if command)
            line = [*on_host(NETWORK, i + 1), "sh", "-c", script]
            children.append(subprocess.Popen(line, **OUTPUT))
        return [line for child in children for line in child.communicate()[0].splitlines()]

    def _broadcast(self, data: Path) -> list[str]:
        """Copy file by file with sbcast, as a batch script does, and load a first batch on each node."""
        target = self.slurm / "local" / "copy"
        loading = [sys.executable, "-c", FIRST_BATCH, str(target), "full", str(BATCH), "SLURM_PROCID", str(NUM_NODES)]
        script = f"""
            srun sh -c 'rm -rf {target} && mkdir {target}' &&
            for file in {data}/*; do sbcast "$file" {target}/"${{file##*/}}" || exit 1; done &&
            srun {shlex.join(loading)} && srun rm -rf {target}"""
        line = ["salloc", "--quiet", f"-N{NUM_NODES}", "--ntasks-per-node=1", "sh", "-c", script]
        words = ["bash", "-c", '. "$0" && exec "$@"', str(self.slurm / "env.sh"), *line]
        return subprocess.run(words, **OUTPUT).stdout.splitlines()


@contextmanager
def slurm(size_bytes: int) -> Iterator[Path | None]:
    """Have a Slurm of the hosts, whose nodes have a RAM disk for a copy each, for a block; None where it cannot be."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # munged wants folders that others can enter
    settings = {"TB_NETNS": NETWORK, "TB_SUBNET": SUBNET, "TB_NODES": str(NUM_NODES), "TB_PORT": PORT,
                "TB_NVME_MB": str(size_bytes * 3 // 2**21)}  # fmt: skip
    try:
        done = subprocess.run([TESTBED / "slurm-up.sh", folder], env=os.environ | settings, stdout=subprocess.DEVNULL)
        yield None if done.returncode else folder
    finally:
        subprocess.run([TESTBED / "slurm-down.sh", "--rm", folder], check=True, stdout=subprocess.DEVNULL)


def larger(folder: Path, place: Path, times: int) -> Path:
    """Pack a corpus of photographs, each of them `times` times, so that starting programs takes little of a copy."""
    images = place / "images"
    for path in (folder / "images" / "train").glob("*/*"):
        target = images / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        for i in range(times):
            (target / f"{i}-{path.name}").hardlink_to(path)
    pack(images, place / "packed", PackOptions(shard_mib=SHARD_MIB))
    shutil.rmtree(images)
    return place / "packed" / "train"


def nodes(data: Path, place: Path, mbps: float, rounds: int) -> tuple[dict[str, dict], dict[str, str]]:
    """Copy a data set to four nodes in all ways. Return the figures of each, and why some are absent."""
    backing, absent = place / "backing", {}
    shutil.copytree(data, backing / "data")
    size_bytes = Manifest.read(data).size_bytes
    with ExitStack() as stack:
        stack.enter_context(hosts(NETWORK, NUM_NODES, SUBNET))
        cluster = stack.enter_context(slurm(size_bytes))
        shared = cluster / "shared" if cluster else WORK  # what is mounted there, Slurm's nodes see
        paths = (shared / f"slow-{os.getpid()}", shared / f"slow-mapped-{os.getpid()}")
        mount = stack.enter_context(SlowMount(backing, paths[0], direct=True, read_mbps=mbps))
        mapped = stack.enter_context(SlowMount(backing, paths[1], read_mbps=mbps))
        if cluster is None:
            absent[SBCAST] = "Slurm does not start here"
        names = [name for name in ON_NODES if name not in absent]
        runs = interleaved(names, rounds, Nodes(mount, mapped, place, cluster).run)
    return {name: summarise(its) for name, its in runs.items()}, absent


def report_nodes(figures: dict[str, dict], size_bytes: int, floor_s: float) -> str:
    rows = []
    for name, its in figures.items():
        wall, own, cpu = (shown(its[key], 1) if key in its else "" for key in ("wall_s", "own_s", "cpu_s"))
        ratio = f"{its['own_s']['median'] / floor_s:.2f}" if "own_s" in its else ""
        read = f"{its['read_bytes']['median'] / size_bytes:.3f}"
        rows.append([name, wall, own, ratio, shown(its["first_batch_s"], 1), read, cpu])
    header = ["four nodes", "wall s", "without imports", "÷ data ÷ bandwidth", "first batch s", "read ÷ data", "CPU s"]
    return table(header, rows)


# --- scale ---


def scale() -> list[dict]:
    """Plan for 1,024 nodes. Return a row for each size and way, with the seconds that bandwidths alone impose."""
    rows = []
    for samples in SCALE_SAMPLES:
        for way in WAYS:
            line = [sys.executable, "-m", "benchmarks.stage_plans", str(samples), str(SCALE_NODES), way]
            row = {"samples": samples, "way": way} | json.loads(process(line)[0])
            times = {
                "shared filesystem": row["shared_bytes"] / SHARED_BPS,
                "network": (row["read_bytes"] + row["received_bytes"]) / NETWORK_BPS,
                "disk": row["written_bytes"] / DISK_BPS,
            }
            row["slowest"] = max(times, key=times.__getitem__)
            rows.append(row | {"seconds": times[row["slowest"]], "fits": row["written_bytes"] <= DISK_BYTES})
    return rows


def report_scale(rows: list[dict]) -> str:
    cells = [
        [
            f"{row['samples'] / 1e6:,.4g} million, {row['way']}",
            f"{row['planning_s']:,.2f}",
            f"{row['planning_bytes'] / 1e6:,.0f}",
            f"{row['planned_share']:.3f}",
            f"{row['shared_bytes'] / 1e12:,.2f}",
            f"{(row['read_bytes'] + row['received_bytes']) / 1e9:,.1f}",
            f"{row['sent_bytes'] / 1e9:,.1f}",
            f"{row['seconds']:,.1f} ({row['slowest']})",
            "yes" if row["fits"] else "no",
        ]
        for row in rows
    ]
    header = [f"{SCALE_NODES:,} nodes", "planning s", "MB", "planned part", "TB from shared", "GB into a node",
              "GB out of it", "least s", "fits"]  # fmt: skip
    return table(header, cells)


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=3)
    parser.add_argument("--times", type=int, default=2, help="nodes: of each photograph (default: %(default)s)")
    parser.add_argument("--mbps", type=float, default=100, help="of the shared filesystem (default: %(default)s)")
    parser.add_argument("--only", choices=["local", "nodes", "scale"], help="one section; no record")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it unmounts then, too
    record: dict = {"environment": environment(), "rounds": arguments.rounds}
    folder = corpus.photographs(arguments.count)
    record["corpus"] = corpus.describe(folder)
    WORK.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="stage-", dir=RAM_DISK) as memory,
        tempfile.TemporaryDirectory(prefix="stage-", dir=WORK) as disk,
    ):
        if arguments.only in (None, "local"):
            packed = larger(folder, Path(disk), 1)
            size_bytes = Manifest.read(packed).size_bytes
            record["local"] = {"bytes": size_bytes, "places": {}}
            absent = {name: "not installed" for name, words in COPIERS.items() if not shutil.which(words[0])}
            record["local"]["absent"] = absent
            for place in (Path(memory), Path(disk)):
                source, kind = shutil.copytree(packed, place / "source"), mounted_as(place)
                figures = record["local"]["places"][kind] = local(source, place, arguments.rounds)
                shutil.rmtree(source)
                print("\n" + report_local(kind, figures, size_bytes) + "\n", flush=True)
            print("".join(f"without {name}: {reason}\n" for name, reason in absent.items()))
            shutil.rmtree(packed.parent)
        if arguments.only in (None, "nodes"):
            packed = larger(folder, Path(disk), arguments.times)
            size_bytes = Manifest.read(packed).size_bytes
            settings = {"nodes": NUM_NODES, "mbps": arguments.mbps, "shard_mib": SHARD_MIB, "bytes": size_bytes,
                        "floor_s": size_bytes / arguments.mbps / 1e6}  # fmt: skip
            figures, absent = nodes(packed, Path(memory), arguments.mbps, arguments.rounds)
            record["nodes"] = {"settings": settings, "absent": absent, "ways": figures}
            print("\n" + report_nodes(figures, size_bytes, settings["floor_s"]) + "\n", flush=True)
            print("".join(f"without {name}: {reason}\n" for name, reason in absent.items()))
    if arguments.only in (None, "scale"):
        settings = {"nodes": SCALE_NODES, "ranks_per_node": RANKS_PER_NODE, "batch_per_rank": BATCH,
                    "shared_bps": SHARED_BPS, "network_bps": NETWORK_BPS, "disk_bps": DISK_BPS,
                    "disk_bytes": DISK_BYTES}  # fmt: skip
        record["scale"] = {"settings": settings, "rows": scale()}
        print("\n" + report_scale(record["scale"]["rows"]) + "\n")
    if not arguments.only:
        print(write_record("stage", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
