"""`trainer compare`: two groups of runs, in ratios with intervals, and in words. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from datapipe.console import format_count, printable

from ..reporting.formatting import format_figure
from ..reporting.runlog import recipe_section
from .runs import RunGroup, check_comparable, differences
from .statistics import Estimate, describe, mean_difference, mean_ratio
from .tables import format_interval, format_table, group_notes, group_values, to_json

# Figures that are compared by their ratio: how they are called and written, and the words for less and more.
_RATIOS = {
    "time_to_target_s": ("time to target, s", "{:,.1f}", "less", "more"),
    "elapsed_s": ("total time, s", "{:,.1f}", "less", "more"),
    "epochs_to_target": ("epochs to target", "{:,.2f}", "fewer", "more"),
    "images_per_s": ("images/s", "{:,.0f}", "fewer", "more"),
}
# Settings on which it depends what an accuracy means: those of evaluations.
_MEASURED_BY = (("train", "evaluate_mirrored"), ("train", "precise_bn_batches"), ("data", "eval_size"))


@dataclass(frozen=True)
class Comparison:
    """A figure of two groups.

    Attributes:
        figure: Name of the figure.
        a: Mean of the figure in the first group, as text; with "(3 of 5)" if not all runs have it.
        b: Mean of the figure in the second group, as text; with "(3 of 5)" if not all runs have it.
        estimate: Ratio B/A, or the difference B - A.
        is_ratio: Whether the estimate is the ratio.
        verdict: Meaning of the estimate, in words.
    """

    figure: str
    a: str
    b: str
    estimate: Estimate
    is_ratio: bool
    verdict: str


def compare(a: RunGroup, b: RunGroup) -> list[Comparison]:
    """Compare two groups of runs, B with A.

    Ratios are of geometric means, with Welch's interval of the logarithms; the difference of accuracies is one of
    means, with Welch's interval (see `trainer.measuring.statistics`). Each is a 95 % interval by itself: of twenty
    figures that do not differ, about one is called different. A run that lacks a figure is counted apart.

    Raises:
        SettingError: Their targets, data sets or validation images differ.
    """
    check_comparable({_name(side, group): group.outcomes for side, group in (("A", a), ("B", b))})
    rows = []
    for key, (name, form, less, more) in _RATIOS.items():
        if key not in ("elapsed_s", "images_per_s") and not a.has_target:
            continue
        values = [[value for value in group.values(key) if value > 0] for group in (a, b)]
        ratio = mean_ratio(*values)
        change = abs(ratio.value - 1)
        words = f"has {format_figure(change, '{:.1%}')} {less if ratio.value < 1 else more}"
        rows.append(_row(name, form, key, (a, b), ratio, words))
    difference = mean_difference(a.values("accuracy"), b.values("accuracy"))
    points = 100 * abs(difference.value)
    words = f"is {format_figure(points, '{:.2f}')} points {'lower' if difference.value < 0 else 'higher'}"
    return [*rows, _row("accuracy", "{:.2%}", "accuracy", (a, b), difference, words)]


def _name(side: str, group: RunGroup) -> str:
    """Return what tells a group from the other; a single run's folder is named by the run anyway."""
    return side if [outcome.name for outcome in group.outcomes] == [group.name] else f"{side}, {group.name}"


def _row(
    name: str, form: str, key: str, groups: tuple[RunGroup, RunGroup], estimate: Estimate, words: str
) -> Comparison:
    is_ratio = key in _RATIOS
    neutral = 1.0 if is_ratio else 0.0
    if math.isnan(estimate.value):
        verdict = "unknown: a side has no such figure"
    elif estimate.value == neutral and not estimate.low < estimate.high:
        verdict = "both are equal"
    elif math.isnan(estimate.low):
        verdict = f"B {words}; a side is a single run, so nothing is known of its noise"
    elif estimate.low == estimate.high:  # as of whole epochs, by chance
        verdict = f"B {words}; all runs of each side are equal, so nothing is known of their noise"
    elif estimate.is_beyond_noise(neutral):
        verdict = f"B {words}: more than noise"
    else:
        verdict = "cannot be told from noise"
    counts = [(describe(group.values(key)), len(group.outcomes)) for group in groups]
    if any(sample.num < total for sample, total in counts) and not math.isnan(estimate.value):
        verdict += ", among the runs that have it"
    a, b = (
        format_figure(sample.mean, form) + (f" ({sample.num} of {total})" if sample.num < total else "")
        for sample, total in counts
    )
    return Comparison(name, a, b, estimate, is_ratio, verdict)


def comparison_notes(a: RunGroup, b: RunGroup) -> list[str]:
    """List what a reader should know before trusting a comparison: other hardware, versions, numbers of ranks."""
    sides = {"A": a, "B": b}
    firsts = [(side, group.begun[0].header) for side, group in sides.items() if group.begun]
    inside = [f"{side}: {note}" for side, group in sides.items() for note in group_notes(group)]
    every: list[Any] = [recipe_section(header, "train").get("evaluate_every") for _, header in firsts]
    if len(set(every)) > 1 and None not in every:  # earlier versions had no such setting
        what = f"A was evaluated every {format_count(every[0], 'epoch')}, B every {format_count(every[1], 'epoch')}"
        inside.append(f"{what}: a target is reached at the first evaluation at or above it")
    for part, name in _MEASURED_BY:
        tables = [recipe_section(header, part) for _, header in firsts]
        values = [table.get(name) or (table.get("size") if name == "eval_size" else None) for table in tables]
        if len(set(values)) > 1:
            words = (f"{str(value or 'off').lower()} in {side}" for value, side in zip(values, "AB", strict=True))
            inside.append(f"{part}.{name} is {', '.join(words)}: their accuracies do not mean the same")
    return [*differences(firsts), *inside]


def show_comparison(a: RunGroup, b: RunGroup, as_json: bool) -> str:
    """Compare two groups; return text to be read.

    Args:
        a: The first group.
        b: The second.
        as_json: Return JSON instead.

    Raises:
        SettingError: They cannot be compared.
    """
    rows = compare(a, b)
    return to_json(_values(a, b, rows)) if as_json else _text(a, b, rows)


def _text(a: RunGroup, b: RunGroup, rows: list[Comparison]) -> str:
    cells = []
    for row in rows:
        form = "{:.3f}" if row.is_ratio else "{:+.2%}"
        value = format_figure(row.estimate.value, form)
        interval = format_interval(row.estimate, form)
        cells.append([row.figure, row.a, row.b, "B/A" if row.is_ratio else "B - A", value, interval])
    table = format_table(["figure", "A", "B", "", "value", "95 % interval"], cells)
    heads = [
        f"{side}: {group.name}, {format_count(len(group.outcomes), 'run')}" for side, group in (("A", a), ("B", b))
    ]
    verdicts = [f"{row.figure.partition(',')[0]}: {row.verdict}." for row in rows]
    notes = [f"Note: {note}." for note in comparison_notes(a, b)]
    return "\n".join([*map(printable, heads), "", table, "", *map(printable, [*verdicts, *notes])])


def _values(a: RunGroup, b: RunGroup, rows: list[Comparison]) -> dict[str, Any]:
    figures = [
        {"figure": row.figure, "kind": "ratio" if row.is_ratio else "difference"}
        | asdict(row.estimate)
        | {"verdict": row.verdict}
        for row in rows
    ]
    groups = {"a": group_values(a), "b": group_values(b)}
    return groups | {"figures": figures, "notes": comparison_notes(a, b)}
