"""What does a rank take to know the order of an epoch, up to 100 million samples?

    python -m benchmarks.bench_order [--samples 1281167 14197122 100000000] [--rounds 5]

Each run is a process of its own, rank 0 of 8 with batches of 256. `open`: what is worked out once (in blocks, the grid
of an index of samples of 110 kB); `epoch`: what begins each epoch; `batch`: the samples of one batch, the mean of
1,000. Memory is what Python and numpy allocate, at its peak: the index, which is mapped and shared by the ranks of a
node, is not in it. Prints a table, writes results/order.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import command_line, compare, environment, out_folder, process, shown, table, write_record
from datapipe.dataset.index import RECORD

IMAGE_BYTES, SHARD_BYTES = 110_000, 1 << 30
TARGET_S, TARGET_BYTES = 10, 4 << 30  # before the first batch, of 100 million samples
CODE = """
import json, sys, time, tracemalloc
import numpy as np
from datapipe.sampling.block_order import BlockOrder, grid, longest, num_lanes
from datapipe.sampling.order import epoch_order, num_steps, slice_positions
order, path, batch, ranks = sys.argv[1], sys.argv[2], 256, 8
index = np.load(path, mmap_mode="r")
steps = num_steps(len(index), batch * ranks, "drop")
tracemalloc.start()
began = time.perf_counter()
if order == "blocks":
    blocks = grid(index, 8 << 20)
    longest(index, blocks)
opened = time.perf_counter()
if order == "blocks":
    samples = BlockOrder(blocks, batch * ranks, "drop", num_lanes(batch * ranks, ranks), 0, 0)
    samples.needs(0, ranks, range(steps))
    at = lambda positions: samples.at(positions)[0]
else:
    samples = epoch_order(len(index), 0, 0)
    at = samples.__getitem__
planned = time.perf_counter()
_, peak = tracemalloc.get_traced_memory()
tracemalloc.stop()
began_batches = time.perf_counter()
for step in range(1000):
    at(slice_positions(step % steps, batch, 0, ranks))
ended = time.perf_counter()
print(json.dumps({
    "open_s": opened - began, "epoch_s": planned - opened, "batch_s": (ended - began_batches) / 1000,
    "peak_bytes": peak,
}))
"""


def make_index(path: Path, num_samples: int) -> None:
    index = np.lib.format.open_memmap(path, "w+", RECORD, (num_samples,))
    per_shard = SHARD_BYTES // IMAGE_BYTES
    for first in range(0, num_samples, 1 << 22):
        numbers = np.arange(first, min(first + (1 << 22), num_samples))
        part = index[first : first + len(numbers)]
        part["shard"], part["offset"] = numbers // per_shard, numbers % per_shard * IMAGE_BYTES
        part["size"] = IMAGE_BYTES
    index.flush()


def measure(folder: Path, num_samples: int, rounds: int) -> dict[str, dict]:
    """Seconds and bytes of each order."""
    path = folder / f"{num_samples}.npy"
    make_index(path, num_samples)

    def run(order: str, _: int) -> dict:
        output, figures = process([sys.executable, "-c", CODE, order, str(path)])
        return figures | json.loads(output)

    orders = compare(("full", "blocks"), rounds, run, ("open_s", "epoch_s", "batch_s", "peak_bytes", "process_cpu_s"))
    path.unlink()
    for figures in orders.values():
        del figures["runs"]  # their spread says it all
    return orders


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_281_167, 14_197_122, 100_000_000])
    arguments = parser.parse_args()
    record = {"environment": environment(), "targets": {"seconds": TARGET_S, "bytes": TARGET_BYTES}, "samples": {}}
    rows = []
    # On a disk: RAM that holds the index would be missing.
    with tempfile.TemporaryDirectory(dir=out_folder(None, sys.maxsize)) as folder:
        for num_samples in arguments.samples:
            figures = record["samples"][str(num_samples)] = measure(Path(folder), num_samples, arguments.rounds)
            for order, row in figures.items():
                cells = [shown(row[key], 2) for key in ("open_s", "epoch_s")]
                micro = shown({key: value * 1e6 for key, value in row["batch_s"].items()})
                mebi = shown({key: value / 2**20 for key, value in row["peak_bytes"].items()})
                rows.append([f"{num_samples:,}, {order}", *cells, micro, mebi])
    print(table(["samples, order", "open, s", "epoch, s", "batch of 256, µs", "peak, MiB"], rows))
    print(write_record("order", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
