"""The images of the benchmarks: an ImageNet-shaped ImageFolder of photographs, and Fashion-MNIST.

    python -m benchmarks.corpus photographs --count 6000 [--packed]
    python -m benchmarks.corpus fashion-mnist
    python -m benchmarks.corpus originals

Photographs are windows of 500×375 and 375×500 pixels, cut from the photographs in two of Debian's
packages, one class a photograph. Everything goes to benchmarks/work/ and is found there again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import WORK
from datapipe.dataset import DataSet
from datapipe.fetch import fetch
from datapipe.packing import PackOptions, pack

# Their photographs, without drawings, patterns, and misty scenes that compress to half of what photographs do.
PACKAGES = {
    "mate-backgrounds": (
        "usr/share/backgrounds/mate/nature/{}.jpg",
        ("Blinds", "Dune", "Garden", "GreenMeadow", "RainDrops", "TwoWings", "Wood"),
    ),
    "plasma-workspace-wallpapers": (
        "usr/share/wallpapers/{}/contents/images/2560x1600.jpg",
        ("BytheWater", "ColorfulCups", "EveningGlow", "FallenLeaf", "Grey", "OneStandsOut", "Path"),
    ),
}
ORIGINALS = WORK / "originals"
LONG, SHORT = 500, 375  # the commonest sizes in ImageNet's training set
PORTRAITS = 4  # one image in four stands upright
SHORT_SIDE = 520  # photographs are scaled to this first: at full size, a window is mostly a smooth detail
MEAN_BYTES = range(80_000, 110_001)  # ImageNet's training images have 110 kB on average
AIMED_BYTES = 85_000
SHARDS = 8  # of a tar data set, about
DRAWN_NOISE, DRAWN_QUALITY = 12.0, 92  # give files of about AIMED_BYTES
FASHION_MNIST = 60_000
TAR_BYTES = 2240  # of a small PNG and its label in a tar

Window = tuple[str, tuple[int, int, int, int]]  # a class, and left, top, right and bottom in pixels of its photograph


def photographs(count: int, val_count: int = 0, seed: int = 0, quality: int = 0) -> Path:
    """Folder with `images/train/CLASS/*.jpg` (and `images/val`); `packed` adds the formats.

    The same arguments give the same pixels, and the same files with the same Pillow. `quality`: of the JPEG files, in
    place of the one that gives them ImageNet's size.
    """
    name = f"photographs-{count}" + (f"-{val_count}" if val_count else "") + (f"-seed{seed}" if seed else "")
    folder = WORK / (name + (f"-quality{quality}" if quality else ""))
    images = folder / "images"
    if not images.exists():
        sources = find_originals()
        originals = dict(zip((path.stem for path in sources), _do_all(_scaled, sources), strict=True))
        sized, quality = not quality, quality or _quality(originals, seed)
        print(f"{count + val_count:,} windows of {len(originals)} photographs, JPEG quality {quality}", flush=True)
        temporary = _emptied(folder / "images.tmp")

        def write(split: str, i: int, window: Window) -> None:
            label, box = window
            path = temporary / split / label / f"{i:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            originals[label].crop(box).save(path, quality=quality)

        for split, number in (("train", count), ("val", val_count)):
            windows = _windows(originals, number, f"{seed} {split}")
            _do_all(partial(write, split), range(number), windows)
        if sized:
            _check(temporary)
        temporary.rename(images)
    return folder


def drawn(folder: Path, count: int, val_count: int = 0) -> Path:
    """Folder with `images/SPLIT/CLASS/*.jpg` like `photographs`, but drawn here: smooth shapes and noise."""
    images = folder / "images"
    if not images.exists():
        temporary = _emptied(folder / "images.tmp")

        def write(i: int) -> None:
            random = np.random.default_rng(i)
            width, height = (SHORT, LONG) if i % PORTRAITS == PORTRAITS - 1 else (LONG, SHORT)
            y, x = np.mgrid[0:height, 0:width] / LONG
            a, b, c, d = random.uniform(2, 20, (4, 3))
            waves = np.sin(a * x[..., None] + c) * np.cos(b * y[..., None] + d) * 100 + 128
            noisy = waves + random.normal(0, DRAWN_NOISE, (height, width, 1))
            path = temporary / ("train" if i < count else "val") / str(i % 10) / f"{i:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=DRAWN_QUALITY)

        _do_all(write, range(count + val_count))
        temporary.rename(images)
    return folder


def pictures(count: int, val_count: int = 0) -> Path:
    """Folder of `photographs` where the originals are there, else of what `drawn` draws; nothing is downloaded."""
    if ORIGINALS.exists():
        return photographs(count, val_count)
    print(f"no photographs in {ORIGINALS}: drawing pictures", flush=True)
    return drawn(WORK / (f"drawn-{count}" + (f"-{val_count}" if val_count else "")), count, val_count)


def noise(count: int, size: int, channels: int, val_count: int) -> Path:
    """Packed data set of random images of one size, of ten classes, for what needs no picture."""
    folder = WORK / f"noise-{count}-{val_count}-{size}-{channels}"
    if not folder.exists():
        source = _emptied(WORK / "noise.tmp")
        _write_noise(source, count, size, channels, val_count)
        temporary = WORK / "noise-packed.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        pack(source, temporary, PackOptions(format="tar"))
        temporary.rename(folder)
        shutil.rmtree(source)
    return folder


def small_pixels(count: int, size: int) -> Path:
    """Folder with `images/train/CLASS/*.png`, random colours of one size, of ten classes."""
    folder = WORK / f"small-{count}-{size}"
    if not (folder / "images").exists():
        temporary = _emptied(folder / "images.tmp")
        _write_noise(temporary, count, size, 3)
        temporary.rename(folder / "images")
    return folder


def packed(folder: Path) -> Path:
    """The same folder, with its images packed as `tar`, `hdf5` and `lmdb` unless they are already."""
    shard_bytes = sum(path.stat().st_size for path in folder.glob("images/train/*/*")) / SHARDS
    _pack(folder / "images", folder, max(1, round(shard_bytes / 2**20)))
    return folder


def packed_as(folder: Path, name: str, options: PackOptions) -> None:
    """The same folder, with its images packed in a further way, as `name`, unless they are already."""
    if not (folder / name).exists():
        temporary = folder / f"{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        pack(folder / "images", temporary, options)
        temporary.rename(folder / name)


def fashion_mnist(count: int = FASHION_MNIST) -> Path:
    """Folder with `images/{train,val}/CLASS/*.png` and the packed formats, all with the same PNG bytes.

    `count`: that many of the training images, the first; the 10,000 test images are the validation split.
    """
    files = fetch("fashion-mnist", WORK / "fashion-mnist-idx")
    folder = WORK / f"fashion-mnist-{count}"
    images = folder / "images"
    if not images.exists():
        idx, temporary = _emptied(folder / "idx"), _emptied(folder / "images.tmp")
        for path in files:
            content = gzip.decompress(path.read_bytes())
            (idx / path.stem).write_bytes(first_items(content, count) if path.name.startswith("train") else content)
        _pack(idx, folder, shard_mib=max(1, count * TAR_BYTES // SHARDS >> 20))
        for split in ("train", "val"):
            with DataSet(folder / "tar" / split) as data_set:
                for sample, label in enumerate(data_set.index["label"].tolist()):
                    path = temporary / split / str(label) / f"{sample:06}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data_set.read(sample))
        temporary.rename(images)
    return folder


def describe(folder: Path) -> dict:
    """Count, mean bytes and classes of the training images, their JPEG quality, and their tar shards where packed, for
    a record."""
    paths = list((folder / "images" / "train").glob("*/*"))
    sizes = [path.stat().st_size for path in paths]
    quality = _quality_of(paths[0])
    shards = len(list((folder / "tar" / "train").glob("*.tar")))
    return {
        "name": folder.name,
        "images": len(sizes),
        "mean_bytes": round(sum(sizes) / len(sizes)),
        "classes": len(list((folder / "images" / "train").iterdir())),
        **({"jpeg_quality": quality} if quality else {}),
        **({"tar_shards": shards} if shards else {}),
    }


def first_items(idx: bytes, count: int) -> bytes:
    """The first `count` items of an IDX file: its header, of 4 bytes and 4 for each dimension, holds the count."""
    header_bytes = 4 + 4 * idx[3]
    (total,) = struct.unpack_from(">I", idx, 4)
    if not 0 < count <= total:
        raise SystemExit(f"error: {count:,} images: allowed are 1 to {total:,}")
    item_bytes = (len(idx) - header_bytes) // total
    return idx[:4] + struct.pack(">I", count) + idx[8 : header_bytes + count * item_bytes]


def find_originals() -> list[Path]:
    """The photographs, from Debian's packages unless they are there already."""
    if not ORIGINALS.exists():
        temporary = _emptied(ORIGINALS.with_suffix(".tmp"))
        for package, (pattern, names) in PACKAGES.items():
            unpacked = _unpacked(package)
            for name in names:
                shutil.copyfile(unpacked / pattern.format(name), temporary / f"{name}.jpg")
            shutil.rmtree(unpacked)
        temporary.rename(ORIGINALS)
    return sorted(ORIGINALS.iterdir())


def _unpacked(package: str) -> Path:
    folder = _emptied(WORK / f"{package}.tmp")
    try:
        subprocess.run(["apt-get", "-qq", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        shutil.rmtree(folder)
        raise SystemExit(
            f"error: Debian's package {package} cannot be had here ({error}). The photographs need a Debian or "
            f"Ubuntu whose `apt-get download {package}` works (`apt-get update` may help), or a copy of "
            f"{ORIGINALS} from a machine where it did."
        ) from None
    return folder


def _scaled(path: Path) -> Image.Image:
    with Image.open(path) as image:
        scale = SHORT_SIDE / min(image.size)
        return image.convert("RGB").resize([round(side * scale) for side in image.size], Image.Resampling.LANCZOS)


def _windows(originals: dict[str, Image.Image], count: int, seed: str) -> Iterator[Window]:
    """`count` windows, the classes in turn."""
    draw = random.Random(seed)
    labels = sorted(originals)
    for i in range(count):
        label = labels[i % len(labels)]
        width, height = (SHORT, LONG) if i // len(labels) % PORTRAITS == PORTRAITS - 1 else (LONG, SHORT)
        original = originals[label]
        left, top = draw.randint(0, original.width - width), draw.randint(0, original.height - height)
        yield label, (left, top, left + width, top + height)


def _quality(originals: dict[str, Image.Image], seed: int) -> int:
    """The lowest JPEG quality that reaches the aimed mean size on a few windows of each photograph."""
    boxes = _windows(originals, 4 * len(originals), f"{seed} probe")
    probes = [originals[label].crop(box) for label, box in boxes]
    for quality in range(75, 101):
        files = [io.BytesIO() for _ in probes]
        _do_all(lambda file, window, quality=quality: window.save(file, "JPEG", quality=quality), files, probes)
        if sum(file.tell() for file in files) >= AIMED_BYTES * len(probes):
            return quality
    raise SystemExit(f"error: no JPEG quality reaches {AIMED_BYTES:,} bytes an image")


def _quality_of(path: Path) -> int | None:
    """The quality with which Pillow writes the quantisation tables of a JPEG file."""
    with Image.open(path) as image:
        tables = getattr(image, "quantization", None)
    for quality in range(100, 0, -1) if tables else ():
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG", quality=quality)
        if Image.open(file).quantization == tables:
            return quality
    return None


def _write_noise(folder: Path, count: int, size: int, channels: int, val_count: int = 0) -> None:
    def write(i: int) -> None:
        path = folder / ("train" if i < count else "val") / str(i % 10) / f"{i:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(256, size=(size, size, channels), dtype=np.uint8)
        Image.fromarray(pixels.squeeze()).save(path, compress_level=0)

    _do_all(write, range(count + val_count))


def _do_all(work: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """Return what `map` does, by as many threads as there are cores: Pillow and numpy let go of Python's lock."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(work, *arguments))


def _check(images: Path) -> None:
    sizes = [path.stat().st_size for path in images.glob("*/*/*")]
    if (mean := round(sum(sizes) / len(sizes))) not in MEAN_BYTES:
        raise SystemExit(f"error: images of {mean:,} bytes on average, not of {MEAN_BYTES[0]:,} to {MEAN_BYTES[-1]:,}")


def _pack(source: Path, folder: Path, shard_mib: float) -> None:
    """Pack in every format, into an even number of tar shards: WebDataset's two workers share them out."""
    while not (folder / "tar").exists():
        manifest = pack(source, folder / "tar", PackOptions(format="tar", shard_mib=shard_mib))["train"]
        if len(manifest.shards) < 2:
            raise SystemExit("error: too few images to give each of WebDataset's workers a shard")
        if len(manifest.shards) % 2:
            shutil.rmtree(folder / "tar")
            shard_mib += 1
    for format in ("hdf5", "lmdb"):
        if not (folder / format).exists():
            pack(source, folder / format, PackOptions(format=format, shard_mib=shard_mib))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a corpus of the benchmarks.")
    parser.add_argument("name", choices=["photographs", "fashion-mnist", "originals"])
    parser.add_argument("--count", type=int, default=6000, help="photographs to train on (default: %(default)s)")
    parser.add_argument("--val-count", type=int, default=0, help="photographs to validate on (default: none)")
    parser.add_argument("--packed", action="store_true", help="photographs: pack them, too, as bench_loader does")
    arguments = parser.parse_args()
    if arguments.name == "originals":
        find_originals()
        print(ORIGINALS)
        return 0
    count, val_count = arguments.count, arguments.val_count
    folder = photographs(count, val_count) if arguments.name == "photographs" else fashion_mnist()
    if arguments.packed and arguments.name == "photographs":
        packed(folder)
    print(f"{folder}: {describe(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
