"""Where a node has room for a part of a data set only: how much does it read, by what it evicts?

    python -m benchmarks.bench_slice [--rounds 5] [--only simulated|real]

Orders of "blocks", with blocks of 8 MiB. Compared: what datapipe does (`choose_slot`, which knows the order of all
epochs), the block that was used least recently (LRU), a block at random, and keeping what came first. `simulated`: 1.28
million samples of 110 kB on 1, 4 and 16 nodes, each with room for 10 to 75 % of the data set: the blocks that a node
reads from the shared filesystem in an epoch, as a share of those that it needs; the mean of the epochs behind the first
ones, in which the disk fills. `real`: photographs and a loader, one process per run, the bytes it reads from the data
set itself; the rest comes from LOCAL. Prints tables, writes results/slice.json.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.corpus import photographs
from benchmarks.measure import command_line, compare, environment, out_folder, process, shown, table, write_record
from datapipe.dataset.block_slots import BlockSlots
from datapipe.loaders import blocks
from datapipe.packing import PackOptions, pack
from datapipe.sampling.block_order import NEVER, BlockOrder, Grid, num_lanes
from datapipe.sampling.cached_blocks import FREE, NextUses, choose_slot
from datapipe.staging import StageOptions, stage

SAMPLES, IMAGE_BYTES, BLOCK_BYTES = 1_281_167, 110_000, 8 << 20
RANKS_PER_NODE, BATCH = 8, 32
NODES, SHARES = (1, 4, 16), (0.1, 0.25, 0.5, 0.75)
POLICIES = ("datapipe", "LRU", "random", "first come")
REAL_EPOCHS, REAL_SHARE = 6, 0.5
CODE = """
import json, sys
from collections import Counter
from benchmarks.bench_slice import REAL_EPOCHS, install
from datapipe.dataset.shard_reader import ShardReader
from datapipe.loaders import open_loader
source, local, policy = sys.argv[1:]
install(policy)
read_bytes, read = Counter(), ShardReader.read
def counted(self, shard, offset, size, into=None):
    read_bytes["source"] += size
    return read(self, shard, offset, size, into)
ShardReader.read = counted
options = {"batch_size": 8, "size": 96, "order": "blocks", "block_mib": 1}
epochs = []
with open_loader(source, cache=local or None, **options) as loader:
    for _ in range(REAL_EPOCHS):
        before = read_bytes["source"]
        for batch in loader:
            pass
        epochs.append(read_bytes["source"] - before)
    print(json.dumps(epochs))
"""


class Policy:
    """What chooses a slot for a block that was read, with the signature of `choose_slot`."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._random = name, random.Random(seed)
        self._used: dict[int, int] = {}  # by block: when it was used last

    def use(self, block: int) -> None:
        """Take note that a block is used."""
        self._used[block] = time.monotonic_ns()

    def __call__(self, uses: NextUses, block: int, tags: np.ndarray) -> int | None:
        if self._name == "datapipe":
            return choose_slot(uses, block, tags)
        free = np.flatnonzero(tags == FREE)
        if len(free):
            return int(free[0])
        if self._name == "LRU":
            return min(range(len(tags)), key=lambda slot: self._used.get(int(tags[slot]), 0))
        return self._random.randrange(len(tags)) if self._name == "random" else None


def install(name: str) -> None:
    """Have this process's loaders evict by a policy."""
    policy, read = Policy(name, 0), BlockSlots.read

    def noted(slots: BlockSlots, block: int, size: int, into: memoryview) -> memoryview | None:
        policy.use(block)
        return read(slots, block, size, into)

    BlockSlots.read = noted  # type: ignore[method-assign]
    blocks.choose_slot = policy  # type: ignore[assignment]


def count_reads(turns: list[np.ndarray], num_slots: int, name: str) -> list[int]:
    """Count the blocks that a node reads from the source.

    Args:
        turns: of each epoch, and of some more to look ahead to.
        num_slots: blocks that it has room for.
        name: of the policy.

    Returns:
        By epoch.
    """
    tags, slots = np.full(num_slots, FREE), dict[int, int]()  # by block: its slot
    recent: dict[int, None] = {}  # blocks that are kept, the least recently used first: LRU by a faster way
    policy, ahead, reads = Policy(name, 0), len(turns) // 2, []
    for epoch in range(len(turns) - ahead):
        uses = NextUses(turns.__getitem__, epoch, ahead) if name == "datapipe" else None
        reads.append(0)
        for block in np.argsort(turns[epoch], kind="stable")[: np.count_nonzero(turns[epoch] < NEVER)].tolist():
            if block in slots:
                if name == "LRU":
                    recent[block] = recent.pop(block)
                continue
            reads[-1] += 1
            if name == "LRU" and len(slots) == num_slots:
                slot: int | None = slots[next(iter(recent))]
            elif len(slots) < num_slots:
                slot = len(slots)
            else:
                slot = policy(uses, block, tags)  # type: ignore[arg-type]
            if slot is not None:
                if tags[slot] != FREE:
                    del slots[int(tags[slot])]
                    recent.pop(int(tags[slot]), None)
                tags[slot], slots[block], recent[block] = block, slot, None
    return reads


def simulate(num_nodes: int, num_samples: int = SAMPLES, seeds: int = 1) -> dict[str, dict[str, float]]:
    """Return the share of its blocks that node 0 reads from the source: by room, and by policy."""
    per_block = BLOCK_BYTES // IMAGE_BYTES
    blocks = Grid(np.arange(num_samples), np.append(np.arange(0, num_samples, per_block), num_samples))
    num_blocks, world_size = len(blocks.starts) - 1, num_nodes * RANKS_PER_NODE
    lanes, epochs = num_lanes(BATCH * world_size, world_size), 4 + 4 * num_nodes
    turns = [
        BlockOrder(blocks, BATCH * world_size, "drop", lanes, 0, epoch).turns(range(RANKS_PER_NODE), world_size)
        for epoch in range(2 * epochs)
    ]
    needed = [int(np.count_nonzero(turn < NEVER)) for turn in turns]
    shares: dict[str, dict[str, float]] = {}
    for share in SHARES:
        shares[str(share)] = {}
        for policy in POLICIES:
            reads = count_reads(turns, int(share * num_blocks), policy)
            half = len(reads) // 2  # the disk is full by then
            shares[str(share)][policy] = sum(reads[half:]) / sum(needed[half : len(reads)])
    return shares


def measure(folder: Path, source: Path, rounds: int) -> dict[str, dict]:
    """Bytes that a loader reads from the data set in an epoch, as a share of it."""
    size_bytes = sum(path.stat().st_size for path in source.glob("shard-*.tar"))

    def run(policy: str, number: int) -> dict:
        local = folder / f"{policy}-{number}"
        if policy != "nothing":
            options = StageOptions(mode="slice", capacity_bytes=int(REAL_SHARE * size_bytes), chunk_mib=1)
            stage(source, local, options)
        cache = str(local) if policy != "nothing" else ""
        output, _ = process([sys.executable, "-c", CODE, str(source), cache, policy])
        epochs = json.loads(output)[REAL_EPOCHS // 2 :]
        shutil.rmtree(local, ignore_errors=True)
        return {"read_share": sum(epochs) / len(epochs) / size_bytes}

    return compare(("nothing", *POLICIES), rounds, run)


def main() -> int:
    parser = command_line(__doc__, count=2000, rounds=5)
    parser.add_argument("--only", choices=("simulated", "real"), help="one section; writes no record")
    arguments = parser.parse_args()
    record: dict = {"environment": environment(), "blocks": {"samples": SAMPLES, "image_bytes": IMAGE_BYTES}}
    if arguments.only != "real":
        record["simulated"] = {str(nodes): simulate(nodes) for nodes in NODES}
        rows = [
            [f"{nodes} nodes, room for {float(share):.0%}", *(f"{by_policy[policy]:.3f}" for policy in POLICIES)]
            for nodes, shares in record["simulated"].items()
            for share, by_policy in shares.items()
        ]
        print(table(["read from the source, of what is needed", *POLICIES], rows))
    if arguments.only != "simulated":
        with tempfile.TemporaryDirectory(dir=out_folder(None, 4 << 30)) as folder:
            pack(photographs(arguments.count), Path(folder) / "packed", PackOptions(shard_mib=32))
            runs = measure(Path(folder), Path(folder) / "packed" / "train", arguments.rounds)
        record["real"] = {"photographs": arguments.count, "room": REAL_SHARE, "policies": runs}
        rows = [[name, shown(row["read_share"], 3)] for name, row in runs.items()]
        print(table(["evicts", "read from the source, of the data set"], rows))
    if not arguments.only:
        print(write_record("slice", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
