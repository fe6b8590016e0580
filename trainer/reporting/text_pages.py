"""Pages of text for report.pdf: tables of names and values, in letters of one width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tables = Mapping[str, Mapping[str, str]]  # values by name, by title

NAME_WIDTH, VALUE_WIDTH, NUM_LINES = 28, 84, 76  # what fits on a page, in letters and lines
SIZE_INCHES = 9.0, 11.0


def draw_text_pages(tables_by_heading: Mapping[str, Tables]) -> Iterator[Figure]:
    """Yield as many pages as tables take; those below each heading begin on a page of their own."""
    from matplotlib.figure import Figure

    for heading, tables in tables_by_heading.items():
        lines = lay_out(tables)
        for first in range(0, len(lines), NUM_LINES):
            figure = Figure(figsize=SIZE_INCHES)
            figure.text(0.05, 0.97, heading, va="top", weight="bold")
            text = "\n".join(lines[first : first + NUM_LINES])
            figure.text(0.05, 0.94, text, va="top", family="monospace", size=8, linespacing=1.2)
            yield figure


def lay_out(tables: Tables) -> list[str]:
    """Return the lines of some tables: a title, and below it names with their values, which may take several lines."""
    lines: list[str] = []
    for title, table in tables.items():
        lines += ["", title] if lines else [title]
        for name, value in table.items():
            parts = wrap(value, VALUE_WIDTH) or [""]
            names = wrap(name, NAME_WIDTH) or [""]
            for i in range(max(len(parts), len(names))):
                left, right = (texts[i] if i < len(texts) else "" for texts in (names, parts))
                lines.append(f"  {left:{NAME_WIDTH}}  {right}".rstrip())
    return lines
