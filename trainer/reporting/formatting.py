"""Figures and values as a reader sees them in the report."""

from __future__ import annotations

import json
import math

from .runlog import number

DASH, SPACE = "\N{EN DASH}", "\N{NO-BREAK SPACE}"


def format_figure(value: float, form: str) -> str:
    """Return a figure in `str.format`'s notation, e.g. `{:.1%}`; a dash for NaN."""
    return DASH if math.isnan(value) else form.format(value).replace("%", f"{SPACE}%")


def format_percent(value: float, _position: object = None) -> str:
    """Return a share as a tick of an axis shows it."""
    return f"{100 * value:.4g}{SPACE}%"


def format_duration(value: object) -> str:
    """Return seconds in the units that fit, e.g. `2 min 54 s`; a dash for what is not a number."""
    seconds = number(value)
    if math.isnan(seconds) or seconds < 60:
        return format_figure(seconds, f"{{:.1f}}{SPACE}s")
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
    return text.replace(" ", SPACE)


def format_value(value: object) -> str:
    """Return any value as text in one line, with nothing in it that cannot be printed."""
    if isinstance(value, list):
        value = " ".join(map(format_value, value))
    text = value if isinstance(value, str) else DASH if value is None else json.dumps(value)
    return "".join(c if c.isprintable() or c == SPACE else "\N{REPLACEMENT CHARACTER}" for c in text)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit for an axis that ends at `longest_s` seconds: its length in seconds, and its name."""
    if longest_s > 7200:
        return 3600, "h"
    return (60, "min") if longest_s > 180 else (1, "s")
