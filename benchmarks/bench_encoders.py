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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks import corpus
from benchmarks.measure import command_line, compare, environment, out_folder, process, shown, table, write_record
from datapipe.formats import shard_format
from datapipe.formats.tar_listing import list_members
from datapipe.images import codec, jpeg, lanczos
from datapipe.images.codec import ImageHeader
from datapipe.images.recode import RecodeOptions, Recoder
from datapipe.images.turbojpeg import lossless, turbojpeg
from datapipe.loaders.batch_slots import ImageSlots
from datapipe.loaders.image_chunk import ChunkInMemory
from datapipe.loaders.painter import Painter
from datapipe.native import JOB, VARIABLE
from datapipe.sampling.augment import Augment, scales, train_crops
from datapipe.sources.pickled import read_pickle

SIZES = {"small": (20_000, 600), "photo": (2_000, 85_000)}  # images, bytes of each
PIXELS = {"small": (28, 28, 1), "photo": (256, 256, 3)}  # for npy
NUM_JPEGS, SHORT, QUALITY, CROP = 200, 256, 90, 224
OURS = "ours"
Work = Callable[[], object]
Prepare = Callable[[Path], Work]  # makes in a folder whatever is not to be timed


# --- shards ---


class Shard(NamedTuple):
    """What is written: the same image again and again, as encoded bytes or as pixels of a shape."""

    path: Path
    count: int
    data: bytes
    shape: tuple[int, int, int] | None = None


def writing(write: Callable[[Shard], object], size: str, is_raw: bool = False) -> Prepare:
    """Return what prepares to write a shard of one of SIZES."""
    count, num_bytes = SIZES[size]
    shape = PIXELS[size] if is_raw else None
    num_bytes = int(np.prod(shape)) if shape else num_bytes
    return lambda folder: partial(write, Shard(folder / "shard", count, os.urandom(num_bytes), shape))


def write_ours(name: str, shard: Shard) -> None:
    height, width, channels = shard.shape or (375, 500, 3)
    header = ImageHeader("raw" if shard.shape else "jpeg", width, height, channels, 0)
    writer = shard_format(name).Writer()
    with open(shard.path, "wb") as file:
        file.write(writer.head)
        for i in range(shard.count):
            file.writelines(writer.add(f"train_{i:08}", i % 10, shard.data, header))
        finished = writer.finish()
        file.write(finished.tail)
        for position, patch in finished.patches.items():
            file.seek(position)
            file.write(patch)


def write_by_tarfile(shard: Shard) -> None:
    with tarfile.open(shard.path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for i in range(shard.count):
            for suffix, content in (("jpg", shard.data), ("cls", b"%d" % (i % 10))):
                member = tarfile.TarInfo(f"train_{i:08}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_by_lmdb(shard: Shard) -> None:
    import lmdb

    room = 2 * shard.count * (len(shard.data) + 8192)
    with lmdb.open(str(shard.path), map_size=room, subdir=False, lock=False, sync=False) as env:
        for first in range(0, shard.count, 1000):
            with env.begin(write=True) as transaction:
                for i in range(first, min(first + 1000, shard.count)):
                    transaction.put(b"train_%08d.cls" % i, b"%d" % (i % 10), append=True)
                    transaction.put(b"train_%08d.jpg" % i, shard.data, append=True)


def write_by_h5py(shard: Shard) -> None:
    import h5py

    data, count = np.frombuffer(shard.data, np.uint8), shard.count
    with h5py.File(shard.path, "w") as file:
        images = file.create_dataset("bytes", (count * len(data),), np.uint8)
        for i in range(count):
            images[i * len(data) : (i + 1) * len(data)] = data
        file["offsets"] = np.arange(count + 1, dtype=np.uint64) * len(data)
        file["labels"] = np.arange(count, dtype=np.uint32) % 10
        file["keys"] = np.array([f"train_{i:08}" for i in range(count)], dtype="S")


def write_by_tfrecord(shard: Shard) -> None:
    from tfrecord.writer import TFRecordWriter

    same = {"image/height": (375, "int"), "image/width": (500, "int"), "image/channels": (3, "int"),
            "image/format": (b"JPEG", "byte"), "image/encoded": (shard.data, "byte")}  # fmt: skip
    writer = TFRecordWriter(str(shard.path))
    for i in range(shard.count):
        own = {"image/class/label": (i % 10, "int"), "image/filename": (b"train_%08d" % i, "byte")}
        writer.write(same | own)
    writer.close()


def write_by_numpy(shard: Shard) -> None:
    data = np.frombuffer(shard.data, np.uint8).reshape(shard.shape)
    images = np.lib.format.open_memmap(shard.path, "w+", np.uint8, (shard.count, *shard.shape))
    for i in range(shard.count):
        images[i] = data
    images.flush()
    np.save(shard.path.with_name("labels"), np.arange(shard.count, dtype=np.uint32) % 10)
    shard.path.with_name("keys").write_text("".join(f"train_{i:08}\n" for i in range(shard.count)))


def listing(read: Callable[[Path], object], size: str) -> Prepare:
    """Return what writes a tar of one of SIZES, and prepares to list it."""

    def prepare(folder: Path) -> Work:
        writing(partial(write_ours, "tar"), size)(folder)()
        return partial(read, folder / "shard")

    return prepare


def list_ours(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    list_members(fd, str(path))
    os.close(fd)


def list_by_tarfile(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path, "r:") as archive:
        return [(member.name, member.offset_data, member.size) for member in archive]


# --- single files and images ---


def doing(function: Callable[[Any], object], make: Callable[[Path], Iterable[Any]]) -> Prepare:
    """Return what makes items, and prepares to call a function for each."""

    def prepare(folder: Path) -> Work:
        items = list(make(folder))
        return lambda: [function(item) for item in items]

    return prepare


def make_pickle(_: Path) -> list[bytes]:
    """Make one like a batch of CIFAR-100."""
    count = 10_000
    names, labels = [f"train_{i:08}.png" for i in range(count)], [i % 100 for i in range(count)]
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072), np.uint8)
    batch = {"data": pixels, "filenames": names, "fine_labels": labels, "coarse_labels": labels}
    return [pickle.dumps(batch, 2)]


def make_jpegs(folder: Path) -> list[bytes]:
    drawn = corpus.drawn(folder / "drawn", NUM_JPEGS)
    return [path.read_bytes() for path in sorted(drawn.glob("images/train/*/*.jpg"))]


def make_many_jpegs(folder: Path) -> list[bytes]:
    return make_jpegs(folder) * 20


def make_pixels(folder: Path) -> list[np.ndarray]:
    return [codec.decode(data, 3) for data in make_jpegs(folder)]


def make_digits(_: Path) -> list[np.ndarray]:
    """Make shapes on black, as large and as dark as those of Fashion-MNIST."""
    random = np.random.default_rng(0)
    mask = np.zeros((28, 28), bool)
    mask[4:24, 6:22] = True
    return [np.where(mask, random.normal(150, 40, (28, 28)).clip(0, 255), 0).astype(np.uint8) for _ in range(5000)]


def make_pngs(folder: Path) -> list[bytes]:
    return [codec.encode_png(pixels) for pixels in make_digits(folder)]


def short_side(width: int, height: int) -> tuple[int, int]:
    return RecodeOptions(resize=f"short={SHORT}").target(width, height)


def resize_ours(pixels: np.ndarray) -> np.ndarray:
    return lanczos.resize(pixels, *short_side(pixels.shape[1], pixels.shape[0]))


def resize_by_pillow(pixels: np.ndarray) -> np.ndarray:
    size = short_side(pixels.shape[1], pixels.shape[0])
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def recode_ours(folder: Path, is_direct: bool = True) -> Work:
    """Prepare to recode, by libturbojpeg's planes or through RGB, as where there is no libturbojpeg."""
    assert turbojpeg(), "this compares libturbojpeg 3, which is not here: pip install '.[turbo]'"
    recoder = Recoder(RecodeOptions(resize=f"short={SHORT}", quality=QUALITY))
    if not is_direct:
        recoder._turbojpeg = None
    return doing(recoder, make_jpegs)(folder)


def recode_by_pillow(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        small = image.resize(short_side(*image.size), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return out.getvalue()


def read_size_by_pillow(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def write_png_by_pillow(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def read_png_by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def check_at_an_eighth(data: bytes) -> np.ndarray:
    return codec.decode(data, 3, smallest=(1, 1), strict=True)


def crop(native: str, folder: Path) -> Work:
    """Prepare to crop and scale a batch, with the decoder in C that DATAPIPE_NATIVE names."""
    os.environ[VARIABLE] = native
    data, numbers = make_jpegs(folder), np.arange(NUM_JPEGS)
    headers = [jpeg.read_markers(image) for image in data]
    widths, heights = (np.array([getattr(header, side) for header in headers]) for side in ("width", "height"))
    jobs = np.zeros(NUM_JPEGS, JOB)
    boxes, flips = train_crops(Augment("random_resized"), widths, heights, CROP, 0, 0, numbers, numbers)
    jobs["width"], jobs["height"], jobs["box"], jobs["flip"] = widths, heights, boxes, flips
    jobs["scale"] = scales(boxes, CROP)
    painter = Painter()
    slots = ImageSlots(numbers, NUM_JPEGS, np.zeros((NUM_JPEGS, CROP, CROP, 3), np.uint8))

    def work() -> None:
        images = ChunkInMemory(numbers.tolist(), numbers, jobs, data)
        painter.put(slots, images)
        assert not images.bad

    return work


# --- what is compared: by whom, and what prepares it ---


FORMATS = {
    "tar": ("tarfile", write_by_tarfile),
    "lmdb": ("lmdb", write_by_lmdb),
    "hdf5": ("h5py", write_by_h5py),
    "tfrecord": ("tfrecord", write_by_tfrecord),
    "npy": ("numpy, mapped", write_by_numpy),
}
CASES: dict[str, dict[str, Prepare]] = {
    f"{name}, {size}": {
        OURS: writing(partial(write_ours, name), size, name == "npy"),
        library: writing(write, size, name == "npy"),
    }
    for name, (library, write) in FORMATS.items()
    for size in SIZES
} | {
    "tar listing, small": {OURS: listing(list_ours, "small"), "tarfile": listing(list_by_tarfile, "small")},
    "tar listing, photo": {OURS: listing(list_ours, "photo"), "tarfile": listing(list_by_tarfile, "photo")},
    "pickle": {OURS: doing(read_pickle, make_pickle), "pickle": doing(pickle.loads, make_pickle)},
    "lanczos": {OURS: doing(resize_ours, make_pixels), "Pillow": doing(resize_by_pillow, make_pixels)},
    "recode": {
        OURS: recode_ours,
        "ours, through RGB": partial(recode_ours, is_direct=False),
        "Pillow": doing(recode_by_pillow, make_jpegs),
    },
    "jpeg header": {
        OURS: doing(jpeg.read_markers, make_many_jpegs),
        "Pillow": doing(read_size_by_pillow, make_many_jpegs),
    },
    "jpeg check": {
        OURS: doing(codec.check_image, make_jpegs),
        "libjpeg-turbo": doing(check_at_an_eighth, make_jpegs),
    },
    "jpeg crops": {OURS: partial(crop, "1"), "libjpeg-turbo, torch": partial(crop, "0")},
    "png write": {OURS: doing(codec.encode_png, make_digits), "Pillow": doing(write_png_by_pillow, make_digits)},
    "png read": {
        OURS: doing(partial(codec.decode, channels=1), make_pngs),
        "Pillow": doing(read_png_by_pillow, make_pngs),
    },
}


def measure_here(case: str, who: str, folder: Path) -> dict:
    work = CASES[case][who](folder)
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

    rows = compare(list(CASES[case]), rounds, run)
    for row in rows.values():
        row["times_cpu"] = row["cpu_s"]["median"] / rows[OURS]["cpu_s"]["median"]
    return rows


def report(results: dict[str, dict]) -> str:
    rows = [
        [f"{case}: {who}", shown(row["cpu_s"], 3), shown(row["wall_s"], 3),
         f"{row['process_peak_bytes']['median'] / 1e6:,.0f}", f"{row['times_cpu']:.2f}"]
        for case, by_who in results.items()
        for who, row in by_who.items()
    ]  # fmt: skip
    return table(["", "CPU s", "wall s", "peak MB", "CPU of ours"], rows)


def main() -> int:
    parser = command_line(__doc__, rounds=5, out=True)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="those whose name begins so; no record is written")
    parser.add_argument("--run", nargs=2, metavar=("CASE", "WHO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure_here(*arguments.run, arguments.out)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory(dir=out_folder(arguments.out, 2 << 30)) as folder:
        corpus.drawn(Path(folder) / "drawn", NUM_JPEGS)
        for case in (case for case in CASES if not arguments.only or case.startswith(tuple(arguments.only))):
            print(case, flush=True)
            results[case] = measure(case, Path(folder), arguments.rounds)
    print(report(results))
    if not arguments.only:
        restart = lossless()
        settings = {"sizes": SIZES, "pixels": PIXELS, "jpegs": NUM_JPEGS, "short": SHORT, "quality": QUALITY,
                    "rounds": arguments.rounds, "libturbojpeg": bool(turbojpeg()),
                    "lossless": "none" if restart is None else "libturbojpeg" if hasattr(restart, "__self__")
                    else "jpegtran",
                    "more_versions": {name: metadata.version(name) for name in ("tfrecord", "crc32c")}}  # fmt: skip
        print(write_record("encoders", {"environment": environment(), "settings": settings, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
