"""What do listing, planning and indexing a data set of ImageNet's size cost?

    python -m benchmarks.bench_plan [--count 200000] [--classes 1000] [--rounds 3]

Images of one pixel, all alike, in class folders on a RAM disk, so that there is little to do but to list, plan and
index them. Each run is a process of its own: start-up alone, up to the plan, and the whole `datapipe pack`. What is
more than start-up is then multiplied up to ImageNet's number of images. Prints a table, writes results/plan.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import command_line, compare, environment, out_folder, process, shown, table, write_record
from datapipe.fsio import mounted_as
from datapipe.images.codec import encode_png

IMAGENET = 1_281_167  # training images of ILSVRC2012
TARGET_CPU_S, TARGET_BYTES = 60, 2 << 30  # for ImageNet
FILE_BYTES = 8192  # of a RAM disk, for an image, its inode and its name
START, PLAN, PACK = "start-up", "list, plan", "list, plan, pack, index"
INDEX = "index_cpu_s"  # of PACK: writing index, keys and manifest from the journal
CODE = {
    START: "import datapipe.packing",
    PLAN: """
from pathlib import Path
import sys
from datapipe.packing import PackOptions
from datapipe.packing.plan import make_plan
from datapipe.sources import open_source
options = PackOptions(shard_mib=256)
plan = make_plan(open_source(Path(sys.argv[1])), options.settings())
""",
    PACK: """
from pathlib import Path
import json, sys, time
from datapipe import packing
from datapipe.packing import job
complete = job.complete
def timed(*arguments):
    start = time.process_time()
    try:
        return complete(*arguments)
    finally:
        print(json.dumps({"index_cpu_s": time.process_time() - start}))
job.complete = timed
packing.pack(Path(sys.argv[1]), Path(sys.argv[2]), packing.PackOptions())
""",
}


def make_images(folder: Path, count: int, classes: int) -> None:
    image = encode_png(np.zeros((1, 1), np.uint8))
    for label in range(classes):
        (folder / f"n{label:08}").mkdir(parents=True)
        for number in range(label, count, classes):
            (folder / f"n{label:08}" / f"n{label:08}_{number}.png").write_bytes(image)


def measure(source: Path, rounds: int) -> dict[str, dict]:
    """CPU seconds and peak memory of each step's processes, and what they would be for ImageNet."""

    def run(name: str, _: int) -> dict:
        with tempfile.TemporaryDirectory(dir=source.parent) as out:
            output, figures = process([sys.executable, "-c", CODE[name], str(source), out])
            return figures | (json.loads(output) if output else {})

    return compare(list(CODE), rounds, run)


def for_imagenet(steps: dict[str, dict], count: int) -> dict[str, dict[str, float]]:
    """The medians, multiplied up from `count` images: start-up once, the rest for each image."""
    start, more = steps[START], IMAGENET / count
    figures = ("process_cpu_s", "process_peak_bytes")
    multiplied = {
        name: {
            key: start[key]["median"] + (steps[name][key]["median"] - start[key]["median"]) * more for key in figures
        }
        for name in (PLAN, PACK)
    }
    multiplied[PACK][INDEX] = steps[PACK][INDEX]["median"] * more
    return multiplied


def report(steps: dict[str, dict], multiplied: dict[str, dict[str, float]], count: int) -> str:
    header = [f"{count:,} images", "wall s", "CPU s", "peak MiB", f"for {IMAGENET:,}: CPU s", "peak GiB"]
    rows = []
    for name, figures in steps.items():
        peak_mib = {key: value / 2**20 for key, value in figures["process_peak_bytes"].items()}
        row = [name, shown(figures["process_wall_s"], 2), shown(figures["process_cpu_s"], 2), shown(peak_mib)]
        if name in multiplied:
            cpu_s, peak = multiplied[name]["process_cpu_s"], multiplied[name]["process_peak_bytes"]
            row += [f"{cpu_s:,.1f}", f"{peak / 2**30:.2f}"]
        rows.append([*row, "", ""][: len(header)])
    return table(header, rows)


def main() -> int:
    parser = command_line(__doc__, count=200_000, rounds=3, out=True)
    parser.add_argument("--classes", type=int, default=1000, help="class folders (default: %(default)s)")
    arguments = parser.parse_args()

    described = environment()
    place = out_folder(arguments.out, 2 * arguments.count * FILE_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-plan-", dir=place) as folder:
        print(f"making {arguments.count:,} images in {place} ({mounted_as(place)})", flush=True)
        make_images(Path(folder, "images"), arguments.count, arguments.classes)
        steps = measure(Path(folder, "images"), arguments.rounds)
    multiplied = for_imagenet(steps, arguments.count)
    print(f"\n{report(steps, multiplied, arguments.count)}")
    cpu_s = multiplied[PLAN]["process_cpu_s"] + multiplied[PACK][INDEX]
    print(
        f"\nMedians (smallest–largest). For {IMAGENET:,} images, listing, planning and indexing take {cpu_s:.1f} CPU-s"
    )
    print(f"(target: {TARGET_CPU_S}); the process that packs as well has its peak at the last figure (target: 2 GiB).")
    record = {
        "environment": described,
        "images": arguments.count,
        "classes": arguments.classes,
        "filesystem": mounted_as(place),
        "rounds": arguments.rounds,
        "steps": steps,
        "imagenet": {"images": IMAGENET, **multiplied},
        "targets": {"process_cpu_s": TARGET_CPU_S, "process_peak_bytes": TARGET_BYTES},
    }
    print(write_record("plan", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
