"""Checks of settings, which several classes of options share."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

from .errors import SettingError

MAX_SECONDS = 1_000_000  # of time limits: the system's own take no more than some weeks


def checked_int(name: str, value: object, lowest: int) -> int:
    """Return a whole number of any type as Python's.

    Args:
        name: Of the setting, for the error.
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


def check_name(name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that a setting is one of several names.

    Args:
        name: Of the setting, for the error.
        value: What it is set to.
        allowed: What it may be set to.

    Raises:
        SettingError: When it is something else.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise SettingError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
