"""Classes from labels as they are written in a source: whole numbers, or names."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from ..errors import SourceError

NUMBER = re.compile(r"-?[0-9]{1,4000}")  # as many digits as int() takes
MAX_CLASSES = 1_000_000  # ImageNet-21k has 21,841 classes; a larger number is an identifier or a mistake


def number_labels(path: Path, labels: dict[str, list[str]]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Number the classes: return their names, and each split's labels as uint32[N]. Raises SourceError.

    If all labels are whole numbers, the classes are "0" to the largest. Else labels are names, in alphabetical order.
    """
    distinct: set[str] = set().union(*labels.values())
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


def numbered_classes(path: Path, numbers: Collection[int]) -> list[str]:
    """Name the classes 0 to the largest of `numbers`. Raises SourceError for numbers that cannot be classes."""
    low, high = min(numbers, default=0), max(numbers, default=-1)
    if low < 0 or high >= MAX_CLASSES:
        wrong = low if low < 0 else high
        raise SourceError(f"holds the label {wrong}; allowed: 0 to {MAX_CLASSES - 1}", path=path)
    return [str(number) for number in range(high + 1)]
