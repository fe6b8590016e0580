"""Classes from labels as they are written in a source: whole numbers, or names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SourceError

NUMBER = re.compile(r"-?[0-9]{1,4000}")  # as many digits as int() takes
MAX_CLASSES = 1_000_000  # ImageNet-21k has 21,841; a number beyond this is an identifier or a mistake


def number_labels(path: Path, labels: dict[str, list[str]]) -> tuple[list[str], dict[str, np.ndarray]]:
    """The class names, and each sample's class as uint32[N], from the labels of each split.

    Labels that are all whole numbers are the classes "0" to the largest; else the labels are names, and classes are
    in their order. Raises SourceError.
    """
    distinct = set().union(*labels.values())
    if all(map(NUMBER.fullmatch, distinct)):
        values = {label: int(label) for label in distinct}
        classes = numbered_classes(path, values.values())
    else:
        classes = sorted(distinct)
        values = {label: number for number, label in enumerate(classes)}
    numbers = {
        split: np.fromiter(map(values.__getitem__, column), np.uint32, len(column)) for split, column in labels.items()
    }
    return classes, numbers


def numbered_classes(path: Path, numbers: Sequence[int]) -> list[str]:
    """Names for classes that are only numbers. Raises SourceError."""
    low, high = min(numbers, default=0), max(numbers, default=-1)
    if low < 0 or high >= MAX_CLASSES:
        wrong = low if low < 0 else high
        raise SourceError(f"holds the label {wrong}; allowed: 0 to {MAX_CLASSES - 1}", path=path)
    return [str(number) for number in range(high + 1)]
