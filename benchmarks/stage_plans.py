"""What would staging cost at a size that no one machine has? One plan, in a process of its own.

    python -m benchmarks.stage_plans SAMPLES NODES WAY

By the functions that plan, alone: nothing is read or sent. Answers with a line of JSON: how long planning takes the
first node, its memory, and how many bytes go where. A data set that is too large to plan here is planned in part, and
seconds, memory and requests are multiplied up; `planned_share` says what part that was.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from datapipe.dataset.index import RECORD
from datapipe.packing.options import SHARD_MIB
from datapipe.sampling.block_order import BlockOrder, grid, longest, num_lanes
from datapipe.sampling.order import num_steps
from datapipe.staging.exchange import chunk_bytes_for
from datapipe.staging.options import StageOptions
from datapipe.staging.plan import cut_files, needed_bytes, share_reads, stagger

IMAGE_BYTES = 110_000  # ImageNet's mean
SHARD_BYTES = SHARD_MIB << 20
RANKS_PER_NODE, BATCH = 8, 32  # samples per rank
MOST_CHUNKS, MOST_SAMPLES = 1_000_000, 10_000_000  # that are planned here
WAYS = COPY, EXCHANGE, UNSTAGED = "copy", "exchange", "unstaged, blocks"

Planned = tuple[float, Callable[[], dict[str, float]]]  # the part that is planned, and the planning


def plan(samples: int, nodes: int, way: str) -> dict[str, float]:
    """Plan for the first node of a job; for UNSTAGED, one epoch of its first rank.

    Args:
        samples: Of the data set.
        nodes: Of the job, each with RANKS_PER_NODE ranks.
        way: One of WAYS.

    Returns:
        `data_bytes`; `planning_s`, `planning_bytes` (what Python and numpy allocate, at its peak) and `requests`, the
        reads from the shared filesystem; `planned_share`. `shared_bytes`, read from the shared filesystem by all nodes;
        and by one node, `read_bytes` from there, `received_bytes` from other nodes, `sent_bytes` to them,
        `written_bytes` to its disk.
    """
    data_bytes = float(samples * IMAGE_BYTES)
    share, planning = _blocks(samples, nodes) if way == UNSTAGED else _chunks(data_bytes, nodes, way)
    began = time.perf_counter()
    figures = planning()
    seconds = time.perf_counter() - began
    tracemalloc.start()  # once more: it makes Python slower
    planning()
    _, size = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    figures = {key: value / share for key, value in figures.items()}
    cost = {"planning_s": seconds / share, "planning_bytes": size / share, "planned_share": share}
    return {"data_bytes": data_bytes, **cost, **figures, "written_bytes": 0.0 if way == UNSTAGED else data_bytes}


def _chunks(data_bytes: float, nodes: int, way: str) -> Planned:
    options = StageOptions()
    chunk_bytes = chunk_bytes_for(nodes, options.chunk_bytes) if way == EXCHANGE else options.chunk_bytes
    shards = -(-int(data_bytes) // SHARD_BYTES)
    planned = min(shards, max(1, MOST_CHUNKS * chunk_bytes // SHARD_BYTES))
    sizes = [SHARD_BYTES] * planned
    if planned == shards:
        sizes[-1] = int(data_bytes) - SHARD_BYTES * (shards - 1)

    def copy() -> dict[str, float]:
        mine = stagger(cut_files(sizes, chunk_bytes), 0, nodes, options.num_streams)
        size = needed_bytes(mine)
        return {"requests": len(mine), "shared_bytes": nodes * size, "read_bytes": size, "received_bytes": 0,
                "sent_bytes": 0}  # fmt: skip

    def exchange() -> dict[str, float]:
        chunks = cut_files(sizes, chunk_bytes)
        shares = share_reads(np.ones((nodes, len(chunks)), bool), max(1, options.chunk_bytes // chunk_bytes))
        size, mine = needed_bytes(chunks), needed_bytes([chunks[number] for number in shares[0]])
        # In a ring, as gloo does it: each node passes on what it has just received, except what comes last.
        return {"requests": len(shares[0]), "shared_bytes": size, "read_bytes": mine, "received_bytes": size - mine,
                "sent_bytes": size * (nodes - 1) / nodes}  # fmt: skip

    return sum(sizes) / data_bytes, copy if way == COPY else exchange


def _blocks(samples: int, nodes: int) -> Planned:
    index = np.zeros(min(samples, MOST_SAMPLES), RECORD)
    index["shard"], offsets = np.divmod(np.arange(len(index)), SHARD_BYTES // IMAGE_BYTES)
    index["offset"], index["size"] = offsets * IMAGE_BYTES, IMAGE_BYTES
    ranks = nodes * RANKS_PER_NODE
    batch = ranks * BATCH

    def planning() -> dict[str, float]:
        blocks = grid(index, 8 << 20)
        longest(index, blocks)
        order = BlockOrder(blocks, batch, "pad", num_lanes(batch, ranks), 0, 0)
        needs = order.needs(0, ranks, range(num_steps(len(index), batch, "pad")))
        size = len(index) * IMAGE_BYTES
        return {"requests": len(needs.runs), "shared_bytes": size, "read_bytes": size / nodes, "received_bytes": 0,
                "sent_bytes": 0}  # fmt: skip

    return len(index) / samples, planning


if __name__ == "__main__":
    print(json.dumps(plan(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
