"""What does each hand-written encoder and reader bring over the library that does the same?

    python -m benchmarks.bench_encoders [--rounds 5] [--only tar lanczos] [--out /dev/shm]

Each run is a process of its own with a single thread; ours and the library's take turns. Shards are written whole, to
a RAM disk, from bytes that lie in memory: `small` is 20,000 images of 600 bytes, `photo` 2,000 of 85 kB. The library
is helped where it can be: LMDB gets its keys in order, in few transactions, without sync; HDF5 and npy are told the
number of bytes in advance, which a packer does not know. Prints a table, writes results/encoders.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import corpus
from benchmarks.measure import column, environment, interleaved, out_folder, process, shown, table, write_record
from datapipe.formats import shard_format
from datapipe.formats.tar_listing import list_members
from datapipe.images import codec, jpeg, lanczos
from datapipe.images.codec import ImageHeader
from datapipe.images.recode import RecodeOptions, Recoder
from datapipe.images.turbojpeg import lossless, turbojpeg
from datapipe.loaders.batch_slots import Images
from datapipe.loaders.image_chunk import ImagesInMemory
from datapipe.loaders.painter import Painter
from datapipe.native import JOB, VARIABLE
from datapipe.sampling.augment import Augment, scales, train_crops
from datapipe.sources.pickled import read_pickle

SIZES = {"small": (20_000, 600), "photo": (2_000, 85_000)}  # images, bytes of each
PIXELS = {"small": (28, 28, 1), "photo": (256, 256, 3)}  # for npy
NUM_JPEGS, SHORT, QUALITY, CROP = 200, 256, 90, 224
Work = Callable[[], object]


# Shards: ours against the library's. Each gets a folder and a size, and returns what is to be timed.


def ours(name: str) -> Callable[[Path, str], Work]:
    def prepare(folder: Path, size: str) -> Work:
        count, num_bytes = SIZES[size]
        header = ImageHeader("jpeg", 500, 375, 3, 0)
        if name == "npy":
            height, width, channels = PIXELS[size]
            num_bytes, header = height * width * channels, ImageHeader("raw", width, height, channels, 0)
        data = os.urandom(num_bytes)

        def write() -> None:
            writer = shard_format(name).Writer()
            with open(folder / "ours", "wb") as file:
                file.write(writer.head)
                for i in range(count):
                    file.writelines(writer.add(f"train_{i:08}", i % 10, data, header))
                finished = writer.finish()
                file.write(finished.tail)
                for position, patch in finished.patches.items():
                    file.seek(position)
                    file.write(patch)

        return write

    return prepare


def tar_library(folder: Path, size: str) -> Work:
    count, num_bytes = SIZES[size]
    data = os.urandom(num_bytes)

    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))

    def write() -> None:
        with tarfile.open(folder / "theirs", "w", format=tarfile.USTAR_FORMAT) as archive:
            for i in range(count):
                add(archive, f"train_{i:08}.jpg", data)
                add(archive, f"train_{i:08}.cls", b"%d" % (i % 10))

    return write


def lmdb_library(folder: Path, size: str) -> Work:
    import lmdb

    count, num_bytes = SIZES[size]
    data = os.urandom(num_bytes)

    def write() -> None:
        room = 2 * count * (num_bytes + 8192)
        with lmdb.open(str(folder / "theirs"), map_size=room, subdir=False, lock=False, sync=False) as env:
            for first in range(0, count, 1000):
                with env.begin(write=True) as transaction:
                    for i in range(first, min(first + 1000, count)):
                        transaction.put(b"train_%08d.cls" % i, b"%d" % (i % 10), append=True)
                        transaction.put(b"train_%08d.jpg" % i, data, append=True)

    return write


def hdf5_library(folder: Path, size: str) -> Work:
    import h5py

    count, num_bytes = SIZES[size]
    data = np.frombuffer(os.urandom(num_bytes), np.uint8)

    def write() -> None:
        with h5py.File(folder / "theirs", "w") as file:
            images = file.create_dataset("bytes", (count * num_bytes,), np.uint8)
            for i in range(count):
                images[i * num_bytes : (i + 1) * num_bytes] = data
            file["offsets"] = np.arange(count + 1, dtype=np.uint64) * num_bytes
            file["labels"] = np.arange(count, dtype=np.uint32) % 10
            file["keys"] = np.array([f"train_{i:08}" for i in range(count)], dtype="S")

    return write


def tfrecord_library(folder: Path, size: str) -> Work:
    from tfrecord.writer import TFRecordWriter

    count, num_bytes = SIZES[size]
    data = os.urandom(num_bytes)

    def write() -> None:
        writer = TFRecordWriter(str(folder / "theirs"))
        for i in range(count):
            writer.write(
                {
                    "image/height": (375, "int"),
                    "image/width": (500, "int"),
                    "image/channels": (3, "int"),
                    "image/class/label": (i % 10, "int"),
                    "image/format": (b"JPEG", "byte"),
                    "image/filename": (b"train_%08d" % i, "byte"),
                    "image/encoded": (data, "byte"),
                }
            )
        writer.close()

    return write


def npy_library(folder: Path, size: str) -> Work:
    count, shape = SIZES[size][0], PIXELS[size]
    data = np.frombuffer(os.urandom(int(np.prod(shape))), np.uint8).reshape(shape)

    def write() -> None:
        images = np.lib.format.open_memmap(folder / "theirs", "w+", np.uint8, (count, *shape))
        for i in range(count):
            images[i] = data
        images.flush()
        np.save(folder / "labels", np.arange(count, dtype=np.uint32) % 10)
        (folder / "keys").write_text("".join(f"train_{i:08}\n" for i in range(count)))

    return write


# Reading.


def a_tar(folder: Path, size: str) -> Path:
    ours("tar")(folder, size)()
    return folder / "ours"


def listing_ours(folder: Path, size: str) -> Work:
    path = a_tar(folder, size)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        list_members(fd, str(path))
        os.close(fd)

    return read


def listing_library(folder: Path, size: str) -> Work:
    path = a_tar(folder, size)

    def read() -> list[tuple[str, int, int]]:
        with tarfile.open(path, "r:") as archive:
            return [(member.name, member.offset_data, member.size) for member in archive]

    return read


def a_pickle() -> bytes:
    """Like a batch of CIFAR-100."""
    count = 10_000
    names, labels = [f"train_{i:08}.png" for i in range(count)], [i % 100 for i in range(count)]
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072), np.uint8)
    return pickle.dumps({"data": pixels, "filenames": names, "fine_labels": labels, "coarse_labels": labels}, 2)


# Images.


def jpegs(folder: Path) -> list[bytes]:
    drawn = corpus.drawn(folder / "drawn", NUM_JPEGS)
    return [path.read_bytes() for path in sorted(drawn.glob("images/train/*/*.jpg"))]


def each(function: Callable[[object], object], items: Iterable[object]) -> Work:
    return lambda: [function(item) for item in items]


def short_side(width: int, height: int) -> tuple[int, int]:
    return RecodeOptions(resize=f"short={SHORT}").target(width, height)


def lanczos_ours(folder: Path, _: str) -> Work:
    def resize(pixels: np.ndarray) -> np.ndarray:
        return lanczos.resize(pixels, *short_side(pixels.shape[1], pixels.shape[0]))

    return each(resize, [codec.decode(data, 3) for data in jpegs(folder)])


def lanczos_library(folder: Path, _: str) -> Work:
    def resize(pixels: np.ndarray) -> np.ndarray:
        size = short_side(pixels.shape[1], pixels.shape[0])
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))

    return each(resize, [codec.decode(data, 3) for data in jpegs(folder)])


def recode_ours(folder: Path, _: str) -> Work:
    assert turbojpeg(), "this compares libturbojpeg 3, which is not here: pip install '.[turbo]'"
    return each(Recoder(RecodeOptions(resize=f"short={SHORT}", quality=QUALITY)), jpegs(folder))


def recode_rgb(folder: Path, _: str) -> Work:
    recoder = Recoder(RecodeOptions(resize=f"short={SHORT}", quality=QUALITY))
    recoder._turbojpeg = None  # what is done where there is no libturbojpeg
    return each(recoder, jpegs(folder))


def recode_library(folder: Path, _: str) -> Work:
    def recode(data: bytes) -> bytes:
        with Image.open(io.BytesIO(data)) as image:
            small = image.resize(short_side(*image.size), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        small.save(out, "JPEG", quality=QUALITY, subsampling="4:2:0")
        return out.getvalue()

    return each(recode, jpegs(folder))


def header_ours(folder: Path, _: str) -> Work:
    return each(jpeg.read_header, jpegs(folder) * 20)


def header_library(folder: Path, _: str) -> Work:
    def read(data: bytes) -> tuple[int, int]:
        with Image.open(io.BytesIO(data)) as image:
            return image.size

    return each(read, jpegs(folder) * 20)


def check_by_library(data: bytes) -> np.ndarray:
    return codec.decode(data, 3, smallest=(1, 1), strict=True)  # at an eighth of the size


def crops(name: str) -> Prepare:
    """Prepare to crop and scale images of a batch, with the decoder in C that DATAPIPE_NATIVE names."""

    def prepare(folder: Path, _: str) -> Work:
        os.environ[VARIABLE] = name
        data, numbers = jpegs(folder), np.arange(NUM_JPEGS)
        headers = [jpeg.read_header(image) for image in data]
        widths, heights = (np.array([getattr(header, side) for header in headers]) for side in ("width", "height"))
        jobs = np.zeros(NUM_JPEGS, JOB)
        boxes, flips = train_crops(Augment("random_resized"), widths, heights, CROP, 0, 0, numbers, numbers)
        jobs["width"], jobs["height"], jobs["box"], jobs["flip"] = widths, heights, boxes, flips
        jobs["scale"] = scales(boxes, CROP)
        painter, slots = Painter(), Images(numbers, NUM_JPEGS, np.zeros((NUM_JPEGS, CROP, CROP, 3), np.uint8))

        def work() -> None:
            images = ImagesInMemory(numbers.tolist(), numbers, jobs, data)
            painter.put(slots, images)
            assert not images.bad

        return work

    return prepare


def digits() -> list[np.ndarray]:
    """Shapes on black, as large and as dark as those of Fashion-MNIST."""
    random = np.random.default_rng(0)
    mask = np.zeros((28, 28), bool)
    mask[4:24, 6:22] = True
    return [np.where(mask, random.normal(150, 40, (28, 28)).clip(0, 255), 0).astype(np.uint8) for _ in range(5000)]


def png_library(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def png_read_library(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


OURS = "ours"
FORMATS = {
    "tar": ("tarfile", tar_library),
    "lmdb": ("lmdb", lmdb_library),
    "hdf5": ("h5py", hdf5_library),
    "tfrecord": ("tfrecord", tfrecord_library),
    "npy": ("numpy, mapped", npy_library),
}
Prepare = Callable[[Path, str], Work]
# What is compared, and who does it: who is a function that prepares what is timed.
CASES: dict[str, dict[str, Prepare]] = {
    f"{name}, {size}": {OURS: ours(name), library: write}
    for name, (library, write) in FORMATS.items()
    for size in SIZES
} | {
    "tar listing, small": {OURS: listing_ours, "tarfile": listing_library},
    "tar listing, photo": {OURS: listing_ours, "tarfile": listing_library},
    "pickle": {
        OURS: lambda *_: (lambda data: lambda: read_pickle(data))(a_pickle()),
        "pickle": lambda *_: (lambda data: lambda: pickle.loads(data))(a_pickle()),
    },
    "lanczos": {OURS: lanczos_ours, "Pillow": lanczos_library},
    "recode": {OURS: recode_ours, "ours, through RGB": recode_rgb, "Pillow": recode_library},
    "jpeg header": {OURS: header_ours, "Pillow": header_library},
    "jpeg check": {
        OURS: lambda folder, _: each(codec.check_image, jpegs(folder)),
        "libjpeg-turbo": lambda folder, _: each(check_by_library, jpegs(folder)),
    },
    "jpeg crops": {OURS: crops("1"), "libjpeg-turbo, torch": crops("0")},
    "png write": {OURS: lambda *_: each(codec.encode_png, digits()), "Pillow": lambda *_: each(png_library, digits())},
    "png read": {
        OURS: lambda *_: each(lambda data: codec.decode(data, 1), [codec.encode_png(d) for d in digits()]),
        "Pillow": lambda *_: each(png_read_library, [codec.encode_png(d) for d in digits()]),
    },
}


def measure_here(case: str, who: str, folder: Path) -> dict:
    work = CASES[case][who](folder, case.rpartition(", ")[2])
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}


def measure(case: str, folder: Path, rounds: int) -> dict:
    """Compare all who do the same; `times_cpu` is how many times our CPU seconds each takes."""

    def run(who: str, _: int) -> dict:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            (Path(scratch) / "drawn").symlink_to(folder / "drawn")
            command = [sys.executable, "-m", "benchmarks.bench_encoders", "--run", case, who, "--out", scratch]
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            output, figures = process(command, env={**os.environ, **threads})
            return json.loads(output) | {"process_peak_bytes": figures["process_peak_bytes"]}

    runs = interleaved(list(CASES[case]), rounds, run)
    rows = {
        who: {name: column(results, name) for name in ("cpu_s", "wall_s", "process_peak_bytes")} | {"runs": results}
        for who, results in runs.items()
    }
    for row in rows.values():
        row["times_cpu"] = row["cpu_s"]["median"] / rows[OURS]["cpu_s"]["median"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="those whose name begins so; no record is written")
    parser.add_argument("--out", type=Path, help="default: a RAM disk")
    parser.add_argument("--run", nargs=2, metavar=("CASE", "WHO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure_here(*arguments.run, arguments.out)))
        return 0
    cases = [case for case in CASES if not arguments.only or case.startswith(tuple(arguments.only))]
    results = {}
    with tempfile.TemporaryDirectory(dir=out_folder(arguments.out, 2 << 30)) as folder:
        corpus.drawn(Path(folder) / "drawn", NUM_JPEGS)
        for case in cases:
            print(case, flush=True)
            results[case] = measure(case, Path(folder), arguments.rounds)
    header = ("", "CPU s", "wall s", "peak MB", "CPU of ours")
    rows = [
        (
            f"{case}: {who}",
            shown(row["cpu_s"], 3),
            shown(row["wall_s"], 3),
            f"{row['process_peak_bytes']['median'] / 1e6:,.0f}",
            f"{row['times_cpu']:.2f}",
        )
        for case, whos in results.items()
        for who, row in whos.items()
    ]
    print(table(header, rows))
    if not arguments.only:
        versions = {name: metadata.version(name) for name in ("tfrecord", "crc32c")}
        restart = lossless()
        settings = {
            "sizes": SIZES,
            "pixels": PIXELS,
            "jpegs": NUM_JPEGS,
            "short": SHORT,
            "quality": QUALITY,
            "rounds": arguments.rounds,
            "libturbojpeg": bool(turbojpeg()),
            "lossless": "none" if restart is None else "libturbojpeg" if hasattr(restart, "__self__") else "jpegtran",
            "more_versions": versions,
        }
        print(write_record("encoders", {"environment": environment(), "settings": settings, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
