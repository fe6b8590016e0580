#!/usr/bin/env python3
"""Cut the tests' sample out of Fashion-MNIST: the first images of each class, in the order they come.

    datapipe fetch fashion-mnist raw
    python tools/make_sample.py raw tests/data/fashion-mnist-sample

The same input gives the same images and labels always, and the same bytes with the same zlib.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np

NUM_CLASSES = 10
PER_CLASS = {"train": 240, "t10k": 60}  # 2,400 and 600 images: 1.3 MB in all
IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801  # unsigned bytes in 3 dimensions, and in 1
HEADER_BYTES = {IMAGES_MAGIC: 16, LABELS_MAGIC: 8}  # the magic number and one count a dimension


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the ascending numbers of the first `per_class` samples of each of the 10 classes."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(NUM_CLASSES)]))


def read_idx(path: Path, magic: int) -> np.ndarray:
    """Return a gzipped IDX file of unsigned bytes as an array; `ValueError` if it is none with `magic`."""
    data = gzip.decompress(path.read_bytes())
    file_magic, *shape = np.frombuffer(data, ">u4", HEADER_BYTES[magic] // 4).tolist()
    if file_magic != magic:
        raise ValueError(f"{path}: magic number {file_magic:#x}, not {magic:#x}")
    return np.frombuffer(data, np.uint8, offset=HEADER_BYTES[magic]).reshape(shape)


def write_idx(path: Path, magic: int, array: np.ndarray) -> None:
    header = np.array([magic, *array.shape], ">u4").tobytes()
    # No file name and no time in the gzip header: the bytes are to depend on the images only.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as out:
        out.write(header + array.tobytes())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cut the tests' sample out of Fashion-MNIST.")
    parser.add_argument("raw", type=Path, help="folder of the four whole files")
    parser.add_argument("out", type=Path, help="folder for the four files of the sample")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for split, per_class in PER_CLASS.items():
        images, labels = f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"
        all_labels = read_idx(options.raw / labels, LABELS_MAGIC)
        chosen = first_of_each_class(all_labels, per_class)
        write_idx(options.out / labels, LABELS_MAGIC, all_labels[chosen])
        write_idx(options.out / images, IMAGES_MAGIC, read_idx(options.raw / images, IMAGES_MAGIC)[chosen])
    return 0


if __name__ == "__main__":
    sys.exit(main())
