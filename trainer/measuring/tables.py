"""What a group of runs amounts to: as a table to be read, and as plain values for another program."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from datapipe.console import format_count, printable

from ..reporting.formatting import DASH, format_figure
from ..reporting.runlog import finite, recipe_section
from .runs import Outcome, RunGroup, differences
from .statistics import describe

# Figures with a mean: how they are called and written.
_MEANS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "time_to_target_s": ("time to target, s", "{:,.1f}"),
    "images_per_s": ("images/s", "{:,.0f}"),
}
_COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "best_accuracy": ("best", "{:.2%}"),
    "time_to_target_s": ("to target, s", "{:,.1f}"),
    "elapsed_s": ("seconds", "{:,.1f}"),
    "images_per_s": ("images/s", "{:,.0f}"),
}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in columns, the first aligned to the left, the others to the right; `printable` escapes it."""
    lines = [[*map(printable, line)] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(line)))]).rstrip()
        for line in lines
    )


def format_group(group: RunGroup) -> str:
    """Return a row for each run, then means and their spread, then what a reader should know."""
    rows = []
    for outcome in group.outcomes:
        figures = outcome.figures()
        codes = ", ".join(str(line.get("exit_code")) for line in outcome.attempts)
        row = [outcome.name, outcome.status.replace("_", " ")]
        row += [format_figure(figures[key], form) for key, (_, form) in _COLUMNS.items()]
        rows.append([*row, codes or DASH])
    runs = format_table(["run", "status", *(name for name, _ in _COLUMNS.values()), "exit code"], rows)
    lines = []
    for key, (name, form) in _MEANS.items():
        if key == "time_to_target_s" and not group.has_target:
            continue
        sample = describe(group.values(key))
        count = f"{sample.num} of {len(group.outcomes)} {'reached' if key == 'time_to_target_s' else 'finished'}"
        spread = format_figure(sample.mean, form), format_figure(sample.std, form), format_interval(sample, form)
        lines.append([name, count, *spread])
    means = format_table(["figure", "of the runs", "mean", "std", "95 % interval"], lines)
    return "\n".join([runs, "", means, *(printable(f"Note: {note}.") for note in group_notes(group))])


def format_interval(interval: Any, form: str) -> str:
    """Return from where to where an interval goes; a dash where there is none.

    Args:
        interval: Sample or Estimate whose interval is written.
        form: Format of its ends, as `str.format` has it.
    """
    if math.isnan(interval.low):
        return DASH
    return f"{format_figure(interval.low, form)} to {format_figure(interval.high, form)}"


def show_group(group: RunGroup, as_json: bool) -> str:
    """Return a group of runs as a table, or as JSON."""
    return to_json(group_values(group)) if as_json else format_group(group)


def to_json(values: dict[str, Any]) -> str:
    """Return plain values as JSON, for files and other programs, with null in place of what is unknown."""
    return json.dumps(finite(values), indent=1, ensure_ascii=False, allow_nan=False)


def group_notes(group: RunGroup) -> list[str]:
    """List what a reader should know before trusting the means."""
    notes = differences([(outcome.name, outcome.header) for outcome in group.begun])
    total = len(group.outcomes)
    unfinished = [outcome.name for outcome in group.outcomes if not outcome.is_finished]
    if unfinished:
        notes.append(f"not in the means, as they have not finished: {', '.join(unfinished)}")
    missed = total - len(group.values("time_to_target_s"))
    if group.has_target and 0 < missed < total:
        runs = format_count(total, "run")
        notes.append(f"{missed} of {runs} did not reach the target; the mean time to target is that of the others")
    for outcome in group.begun:
        sizes = [outcome.header.get("world_size"), *(line.get("world_size") for line in outcome.resumes)]
        if len(sizes) > 1:
            ranks = f", on other numbers of ranks: {', '.join(map(str, sizes))}" if len(set(sizes)) > 1 else ""
            notes.append(f"{outcome.name} was resumed {format_count(len(sizes) - 1, 'time')}{ranks}")
    if len(group.values("accuracy")) == 1:
        notes.append("a single run says nothing of the noise")
    return notes


def group_values(group: RunGroup) -> dict[str, Any]:
    """Return the same as plain values."""
    return {
        "name": group.name,
        "hardware": _distinct(
            [{key: outcome.header.get(key) for key in ("device", "world_size")} for outcome in group.begun]
        ),
        "versions": _distinct([outcome.header.get("versions") for outcome in group.begun]),
        "commits": _distinct([outcome.header.get("commit") for outcome in group.begun]),
        "recipe": group.begun[0].settings if group.begun else None,
        "runs": [_outcome_values(outcome) for outcome in group.outcomes],
        "num_finished": sum(outcome.is_finished for outcome in group.outcomes),
        "num_reached": len(group.values("time_to_target_s")),
        "means": {key: asdict(describe(group.values(key))) for key in _MEANS},
        "notes": group_notes(group),
    }


def _outcome_values(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "seed": recipe_section(outcome.header, "train").get("seed"),
        "status": outcome.status,
        **outcome.figures(),
        "num_resumes": len(outcome.resumes),
        "attempts": outcome.attempts,
    }


def _distinct(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]
