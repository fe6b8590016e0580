"""What does each way to store an image cost: in bytes, in CPU time to pack it, and in CPU time to get its pixels back?

    python -m benchmarks.bench_stored [--count 1000] [--rounds 5]

Photographs as from ImageNet, packed into tar shards on a RAM disk and read back in order, decoded whole: without the
crop, resize and flip of training, which are the same for all. Each run is a process of its own; they take turns.
Prints a table, writes results/stored.json.
"""

from __future__ import annotations

import json
import sys
import tempfile

from benchmarks import corpus
from benchmarks.measure import command_line, compare, environment, out_folder, process, shown, table, write_record
from datapipe.fsio import mounted_as
from datapipe.images.recode import RecodeOptions

WAYS = {  # the options of `datapipe pack`: as they are, and as RecodeOptions
    "as it is": {},
    "--restart 8": {"restart": 8},
    "--quality 90 --restart 8": {"quality": 90, "restart": 8},
    "--resize short=256": {"resize": "short=256"},
    "--resize short=256 --restart 8": {"resize": "short=256", "restart": 8},
    "--store raw": {"store": "raw"},
    "--store raw --size 256": {"store": "raw", "size": 256},
    "--store raw --size 256 --compress lz4": {"store": "raw", "size": 256, "compress": "lz4"},
    "--store raw --size 256 --compress zstd": {"store": "raw", "size": 256, "compress": "zstd"},
}
FIGURES = ("stored_bytes", "pack_us", "read_us")
CHILD = """
import json, sys
from pathlib import Path
from benchmarks.measure import cpu_s
from datapipe.dataset import DataSet
from datapipe.packing import PackOptions, pack
from datapipe.images.recode import RecodeOptions
source, out, recode = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
import PIL.Image, simplejpeg
start = cpu_s()  # jpegtran's processes, too
manifest = pack(source, out, PackOptions(recode=RecodeOptions(**recode)))["train"]
packed = cpu_s()
with DataSet(out / "train") as data_set:
    for sample in range(len(data_set)):
        data_set.pixels(sample, data_set.read(sample))
figures = {"pack_us": packed - start, "read_us": cpu_s() - packed}
figures = {name: seconds * 1e6 / manifest.num_samples for name, seconds in figures.items()}
print(json.dumps({**figures, "stored_bytes": manifest.image_bytes / manifest.num_samples, "recode": manifest.recode}))
"""


def main() -> int:
    parser = command_line(__doc__, count=1000, rounds=5, out=True)
    arguments = parser.parse_args()

    described = environment()
    folder = corpus.photographs(arguments.count)
    place = out_folder(arguments.out, arguments.count << 20)

    def run(name: str, _: int) -> dict:
        with tempfile.TemporaryDirectory(dir=place, prefix="bench-stored-") as out:
            command = [sys.executable, "-c", CHILD, str(folder / "images" / "train"), out, json.dumps(WAYS[name])]
            return json.loads(process(command)[0])

    for name, recode in WAYS.items():
        RecodeOptions(**recode)
        run(name, 0)  # reads the source into the page cache, and shows what is not installed
    figures = compare(list(WAYS), arguments.rounds, run, FIGURES)
    for row in figures.values():
        row["recode"] = row["runs"][0]["recode"]
    header = ["datapipe pack", "bytes per image", "CPU-µs to pack it", "CPU-µs to read and decode it"]
    rows = [[name, *(shown(row[key]) for key in FIGURES)] for name, row in figures.items()]
    print(f"\n{corpus.describe(folder)}\n\n{table(header, rows)}\n\nMedians (smallest–largest).")
    record = {
        "environment": described,
        "corpus": corpus.describe(folder),
        "filesystem": mounted_as(place),
        "rounds": arguments.rounds,
        "ways": figures,
    }
    print(write_record("stored", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
