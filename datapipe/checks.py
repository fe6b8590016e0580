"""Checks of settings, which several classes of options share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path

from .errors import SettingError

MAX_SECONDS = 1_000_000  # of time limits: the system's own take no more than some weeks


def checked_int(name: str, value: object, lowest: int) -> int:
    """Return a whole number of any type as Python's.

    Args:
        name: Name of the setting, for the error.
        value: Python's or numpy's number; a bool is not one.
        lowest: The smallest number that is allowed.

    Raises:
        SettingError: When it is not a whole number, or below `lowest`.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= lowest:
        return int(value)
    raise SettingError(f"{name}: {value!r} is out of range; allowed: whole numbers from {lowest}")


def is_number(value: object) -> bool:
    """Whether a value is a number; a bool is not one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_seconds(name: str, value: object) -> None:
    """Raise SettingError when a time limit is not a number above 0."""
    if not (is_number(value) and 0 < value <= MAX_SECONDS):  # type: ignore[operator]
        raise SettingError(f"{name}: {value!r} is out of range; allowed: seconds, above 0, up to {MAX_SECONDS:,}")


def check_bool(name: str, value: object) -> None:
    """Raise SettingError when a setting is neither True nor False."""
    if not isinstance(value, bool):
        raise SettingError(f"{name}: {value!r} is neither True nor False")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the name that a mistyped word resembles or begins, as a question; "" where there is none.

    >>> did_you_mean("accuracy", ["train", "target_accuracy"]), did_you_mean("tfrecrd", ["tar", "tfrecord"])
    ('; did you mean target_accuracy?', '; did you mean tfrecord?')
    """
    names = {name.lower(): name for name in known}
    word = word.lower()
    parts = [name for name in names if len(word) > 2 and (name.startswith(word) or name.endswith(word))]
    close = difflib.get_close_matches(word, names, 1) or sorted(parts, key=len)[:1]
    return f"; did you mean {names[close[0]]}?" if close else ""


def check_name(name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that a setting is one of several names.

    Args:
        name: Name of the setting, for the error.
        value: Value of the setting.
        allowed: Values that the setting may have.

    Raises:
        SettingError: When it is something else.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise SettingError(f"{name}: {value!r} is not one of {', '.join(allowed)}{did_you_mean(str(value), allowed)}")


def check_apart(option: str, folder: Path, other_option: str, other: Path) -> None:
    """Check that two folders do not lie in each other: neither could be replaced or removed without the other.

    Args:
        option: Option that names the first folder, for the error.
        folder: First folder.
        other_option: Option that names the second folder.
        other: Second folder.

    Raises:
        SettingError: They are the same, or one is in the other.
    """
    first, second = folder.resolve(), other.resolve()
    if first == second:
        relation = "is"
    elif first.is_relative_to(second):
        relation = "lies in"
    elif second.is_relative_to(first):
        relation = "holds"
    else:
        return
    raise SettingError(f"{option} {folder}: {relation} {other_option} {other}; allowed: a folder apart from it")
