"""Read spoilt CIFAR pickles with little memory, and print how many were read and how many refused.

Arguments: the bytes that reading may take, a seed, and how many pickles.
"""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path

import numpy as np

from datapipe.errors import SourceError
from datapipe.sources import cifar
from tests.datapipe.sources.children.little_memory import limit_memory

OPCODES = [code for name, code in vars(pickle).items() if name.isupper() and type(code) is bytes and len(code) == 1]


def good_pickles(seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    pickles = []
    for protocol in (0, 2, 4):
        rows = random.integers(0, 256, (2, 3072)).astype(np.uint8)
        for labels in ([3, 9], np.array([3, 9])):
            content = {"data": rows, "labels": labels, "filenames": ["a.png", "b.png"], "batch_label": "batch 1"}
            pickles.append(pickle.dumps(content, protocol))
        pickles.append(pickle.dumps({"label_names": list("abcdefghij"), "num_vis": 3072}, protocol))
    return pickles


def place(data: bytes | bytearray) -> int:
    """Return a place that is mostly where the structure is, not among the pixels."""
    near = min(len(data), 200)
    return random.choice((random.randrange(near), len(data) - 1 - random.randrange(near), random.randrange(len(data))))


def spoil(good: list[bytes]) -> bytes:
    data = bytearray(random.choice(good))
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at, kind = place(data), random.randrange(5)
        if kind == 0:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at:at] = random.choice(OPCODES)
        elif kind == 2:
            data[at] = random.choice(OPCODES)[0]
        elif kind == 3:
            other = random.choice(good)
            start = place(other)
            data[at : at + random.randrange(20)] = other[start : start + random.randrange(60)]
        else:
            del data[at : at + random.randrange(1, 9)]
        data = data or bytearray(b".")
    return bytes(data)


def check_rows(data: bytes) -> None:
    labels, pixels = cifar._parse_python("x", "cifar10", data)
    assert pixels.shape == (len(labels), 32, 32, 3) and pixels.dtype == np.uint8 and labels.max() < 10


def check_names(data: bytes) -> None:
    assert all(type(name) is str for name in cifar._class_names(Path("x"), "cifar10", "python", data))


def main(num_bytes: int, seed: int, count: int) -> None:
    limit_memory(num_bytes)
    random.seed(seed)
    good = good_pickles(seed)
    loaded = refused = 0
    for _ in range(count):
        data = spoil(good)
        for check in (check_rows, check_names):
            try:
                check(data)
                loaded += 1
            except SourceError as error:
                refused += 1
                assert len(str(error)) < 500
    print(loaded, refused)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
