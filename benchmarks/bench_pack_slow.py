"""How much longer does packing take than the slowest part of a shared filesystem, its metadata server, must take?

    python -m benchmarks.bench_pack_slow [--count 6000] [--rounds 3] [--meta-ms 5] [--slots 32]

Packs photographs from a FUSE filesystem on which each metadata operation waits, a limited number of them at a time.
Beside it, in turns: threads that only open, read and close the same files in the same order on the same mount.
Needs ../shared/testbed, which makes that filesystem, and root. Prints a table, writes results/pack_slow.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks import corpus
from benchmarks.bench_pack import SPACE
from benchmarks.measure import (
    command_line,
    compare,
    environment,
    out_folder,
    process,
    shown,
    table,
    timed,
    write_record,
)
from benchmarks.testbed import SlowMount
from datapipe.dataset import DataSet
from datapipe.fsio import mounted_as

READERS = 32  # threads of the bare ceiling
TARGET = 1.15
OPERATIONS = (
    "getattr",
    "readdir",
    "open",
    "read",
)  # as slowfs counts them; a look-up is a getattr, a release is not seen
METADATA = ("getattr", "readdir", "open")
PACK = "datapipe, tar"
BARE = f"open, read, close in {READERS} threads"
# Fewest for one file by its name in a folder that is open already, and for one folder listed by its path.
FILE_CALLS, FOLDER_CALLS = ("look-up", "open"), ("look-up", "readdir")


def read_bare(folder: str, names: list[str]) -> None:
    """Read whole files, each by its name in its folder, taken by READERS threads in the order given."""
    folders = {name: os.open(os.path.join(folder, name), os.O_RDONLY) for name in {os.path.dirname(n) for n in names}}
    waiting, taking = iter(names), threading.Lock()

    def work() -> None:
        while True:
            with taking:
                name = next(waiting, None)
            if name is None:
                return
            fd = os.open(os.path.basename(name), os.O_RDONLY, dir_fd=folders[os.path.dirname(name)])
            while os.read(fd, 1 << 20):
                pass
            os.close(fd)

    threads = [threading.Thread(target=work) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in folders.values():
        os.close(fd)


def child(action: str, *words: str) -> int:
    """In a process of its own: pack, or read the files whose names come on standard input; tells the seconds."""
    from benchmarks.peers import pack_datapipe
    from benchmarks.peers.packing import Job

    if action == "pack":
        job = Job(*words, resize=False, workers=0, variant="tar")
        with timed() as seconds:
            pack_datapipe.pack(job)
    else:
        names = sys.stdin.read().split("\n")
        with timed() as seconds:
            read_bare(words[0], names)
    print(json.dumps(seconds))
    return 0


def packed_order(folder: Path) -> list[str]:
    """The files of a packed image folder, in the order in which they were packed."""
    with DataSet(folder / "train") as data_set:
        return [f"{data_set.key(sample)}.jpg" for sample in range(len(data_set))]


def measure(mount: SlowMount, place: Path, count: int, floor_s: float, rounds: int) -> dict:
    """Rounds of both on a mount: figures for each."""
    module = [sys.executable, "-m", "benchmarks.bench_pack_slow", "--child"]
    order = place / "order"

    def run(name: str, _: int) -> dict:
        with tempfile.TemporaryDirectory(dir=place) as out, mount.counted() as counted:
            if name == PACK:
                output, whole = process([*module, "pack", str(mount.path), out])
                order.write_text("\n".join(packed_order(Path(out))))
            else:
                with open(order) as names:
                    output, whole = process([*module, "read", str(mount.path)], stdin=names)
        calls = counted["calls"]
        metadata = sum(calls.get(operation, 0) for operation in METADATA)
        each = {f"{name}_per_file": calls.get(name, 0) / count for name in OPERATIONS}
        alone = json.loads(output)
        return {**alone, **whole, **each, "metadata_calls": metadata, "wall_over_floor": alone["wall_s"] / floor_s}

    run(PACK, 0)  # tells the order, and fills the page cache under the mount
    return compare([PACK, BARE], rounds, run)


def report(result: dict, floor_s: float) -> str:
    header = ["slow filesystem", "wall s", "÷ floor", "÷ bare", *(f"{name}/file" for name in OPERATIONS), "CPU s"]
    bare_s, rows = result[BARE]["wall_s"]["median"], []
    for name, figures in result.items():
        row = [name, shown(figures["wall_s"], 2), shown(figures["wall_over_floor"], 2)]
        row += [f"{figures['wall_s']['median'] / bare_s:.2f}"]
        row += [f"{figures[f'{operation}_per_file']['median']:.3f}" for operation in OPERATIONS]
        rows.append([*row, f"{figures['cpu_s']['median']:.1f}"])
    return table(header, rows) + f"\n\nFloor: {floor_s:.2f} s. Target: packing in at most {TARGET} times that."


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    parser = command_line(__doc__, count=6000, rounds=3, out=True)
    parser.add_argument("--meta-ms", type=float, default=5, help="of a metadata operation (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="metadata operations at a time (default: %(default)s)")
    arguments = parser.parse_args()

    described = environment()
    folder = corpus.photographs(arguments.count)
    source, facts = folder / "images" / "train", corpus.describe(folder)
    place = out_folder(arguments.out, SPACE * facts["images"] * facts["mean_bytes"])
    calls = len(FILE_CALLS) * facts["images"] + len(FOLDER_CALLS) * (facts["classes"] + 1)
    floor_s = calls * arguments.meta_ms / 1000 / arguments.slots
    print(f"{facts}, written to {place} ({mounted_as(place)}), {calls:,} necessary metadata calls", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it unmounts then, too
    path = place / f"slow-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="bench-pack-slow-", dir=place) as work,
        SlowMount(source, path, meta_ms=arguments.meta_ms, mds_slots=arguments.slots) as mount,
    ):
        result = measure(mount, Path(work), facts["images"], floor_s, arguments.rounds)
    print("\n" + report(result, floor_s), flush=True)
    settings = {"meta_ms": arguments.meta_ms, "slots": arguments.slots, "filesystem": mounted_as(place)}
    record = {
        "environment": described,
        "corpus": facts,
        "settings": settings,
        "necessary_metadata_calls": calls,
        "floor_s": floor_s,
        "target": TARGET,
        "rounds": arguments.rounds,
        "compared": result,
    }
    print(write_record("pack_slow", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
