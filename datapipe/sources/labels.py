"""Classes from labels as they are written in a source: whole numbers, or names."""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..console import format_count, format_some
from ..errors import SourceError
from ..split_names import NAMED, is_split_name

logger = logging.getLogger(__name__)

NUMBER = re.compile(r"(-?[0-9]{1,4000})(\.0*)?")  # as many digits as int() takes; tables write 3 as 3.0
# Columns that may hold labels.
LABEL_COLUMN = re.compile("(?i).*(labels?|class(es)?|cls|categor(y|ies)|targets?)(_?(id|name))?")
_MAX_CLASSES = 1_000_000  # ImageNet-21k has 21,841 classes; a larger number is an identifier or a mistake
_MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat"}  # what tables write for nothing, lower case
_NONE = "None"  # what Python writes for nothing; none may be a class
SAME_LOOK = "look the same and differ in Unicode's normal form (rename one)"


def number_labels(
    path: Path, labels: Mapping[str, Sequence[str]], how: str = "auto"
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the names of the classes, and each split's labels as uint32[N].

    Args:
        path: The source, for messages.
        labels: The label of each sample as it is written, by split.
        how: "numbers": labels are whole numbers, and the classes are "0" to the largest. "names": each label that
            occurs is a class, in the order of the numbers or else of the alphabet. "auto": numbers if all are.

    Raises:
        SourceError: Labels cannot be classes, or can be read in two ways.
    """
    distinct: set[str] = set().union(*labels.values())
    written = {label: match[1] for label in distinct if (match := NUMBER.fullmatch(label))}
    numbers = {label: int(text) for label, text in written.items()}
    names = sorted(distinct - numbers.keys())
    if pair := alike(names):
        raise SourceError(f"holds two labels that {SAME_LOOK}: {pair[0]!a}, {pair[1]!a}", path=path)
    if names and how == "numbers":
        raise SourceError(f"holds labels that are not whole numbers: {_some(names)}", path=path)
    if how == "auto":
        _check_one_kind(path, sorted(numbers, key=numbers.__getitem__), names)
        _check_spelling(path, set(written.values()))
    texts = {label: str(numbers.get(label, label)) for label in distinct}  # of 3 and 3.0: 3
    if how == "names":
        texts |= written  # 03 is another name than 3
    if names or how == "names":
        classes = sorted(set(texts.values()), key=None if names else lambda text: (int(text), text))
    else:
        classes = _numbered_classes(path, numbers.values(), how)
    warn_of_case(path, classes)
    place = {name: label for label, name in enumerate(classes)}
    number_of = {label: place[text] for label, text in texts.items()}
    return classes, {
        split: np.fromiter(map(number_of.__getitem__, column), np.uint32, len(column))
        for split, column in labels.items()
    }


def _check_one_kind(path: Path, numbers: Sequence[str], names: Sequence[str]) -> None:
    """Raise SourceError unless labels are all whole numbers, or all names."""
    if len(names) > 1 and not numbers and all(map(is_split_name, names)):
        what = f"holds labels that are all names of splits: {_some(names)}"
        raise SourceError(f"{what}; call that column split, or take them as classes with --labels names", path=path)
    odd = [name for name in names if name.lower() in _MISSING or name == _NONE or _is_fraction(name)]
    if odd or (names and numbers):
        what = f"mixes labels that are numbers ({_some(numbers)}) with names ({_some(names)})"
        if odd:
            what = f"holds labels that are neither whole numbers nor names: {_some(odd)}"
        raise SourceError(f"{what}: mend it, or take all as names with --labels names", path=path)


def _check_spelling(path: Path, numbers: Collection[str]) -> None:
    """Raise SourceError for a number that is written in two ways, such as 1 and 01."""
    for other, text in same_by(int, sorted(numbers)):
        raise SourceError(
            f"holds the labels {other} and {text}: --labels numbers takes both as {int(text)}, --labels names keeps "
            "them apart",
            path=path,
        )


def _numbered_classes(path: Path, numbers: Collection[int], how: str = "auto") -> list[str]:
    """Name the classes 0 to the largest of some numbers.

    Raises SourceError if one cannot be a class; or, if `how` is "auto", if most classes would have no image.
    """
    low, high = min(numbers, default=0), max(numbers, default=-1)
    if low < 0 or high >= _MAX_CLASSES:
        wrong = low if low < 0 else high
        raise SourceError(
            f"holds the label {wrong}; allowed: 0 to {_MAX_CLASSES - 1}, or with --labels names any", path=path
        )
    occurring = len(set(numbers))
    if how == "auto" and 2 * occurring < high + 1:
        raise SourceError(
            f"holds only {format_count(occurring, 'number')} of those from 0 to {high} as labels: number the classes "
            "that occur with --labels names (the manifest says which is which), or keep them, and "
            f"{format_count(high + 1 - occurring, 'class', 'classes')} without images, with --labels numbers",
            path=path,
        )
    return [str(number) for number in range(high + 1)]


def check_same_classes(path: Path | str, columns: tuple[str, str], pairs: Collection[tuple[str, str]]) -> None:
    """Raise SourceError unless two columns of labels divide the samples into the same classes.

    Of `label` and `Label` the numbers must be the same, too.

    Args:
        path: The table, for messages.
        columns: Names of the columns.
        pairs: Values of the columns, of all rows.
    """
    first, second = columns
    numbers = [pair for pair in pairs if all(map(NUMBER.fullmatch, pair))] if first.lower() == second.lower() else []
    if any(a != b for a, b in numbers) or any(len({pair[side] for pair in pairs}) < len(set(pairs)) for side in (0, 1)):
        raise SourceError(
            f"has two columns of labels that are not of the same classes, {first} and {second}: say which is meant, as "
            f"--label-column {first}",
            path=path,
        )


def _some(labels: Sequence[str]) -> str:
    return format_some([f"{label:.40}" for label in labels])


def _is_fraction(label: str) -> bool:
    try:
        return math.isfinite(float(label))  # "inf" may be a name
    except ValueError:
        return False


def same_by(key: Callable[[str], object], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that has the key of an earlier one, behind that.

    >>> list(same_by(str.lower, ["cat", "dog", "Cat"]))
    [('cat', 'Cat')]
    """
    first: dict[object, str] = {}
    for name in names:
        if (other := first.setdefault(key(name), name)) != name:
            yield other, name


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two names that only Unicode's normal form tells apart, as files from macOS and from Linux may have."""
    return next(same_by(partial(unicodedata.normalize, "NFC"), names), None)


def warn_of_case(path: Path, classes: Sequence[str]) -> None:
    """Warn of classes whose names differ in case alone: of letters they are two, of animals, and of TRUE, one."""
    if pairs := [f"{other} and {name}" for other, name in same_by(str.casefold, classes)]:
        logger.warning("%s: classes whose names differ in case alone stay apart: %s", path, ", ".join(pairs[:NAMED]))


def out_of_order(names: Sequence[str]) -> str | None:
    """Return the first whole number in a list of them that is not in its numerical place; None: all are, or are not.

    >>> out_of_order(["0", "1", "10", "2"]), out_of_order(["07", "08", "10"])
    ('10', None)
    """
    if not all(map(NUMBER.fullmatch, names)):
        return None
    in_order = sorted(names, key=lambda name: int(name.partition(".")[0]))
    return next((name for name, other in zip(names, in_order, strict=True) if name != other), None)
