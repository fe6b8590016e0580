"""The plot of scaling: images/s and efficiency beside the ideal, and the accuracy of every number of ranks.

Accuracy is that of training and of validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datapipe.fsio import atomic_write

from ..reporting.curves import curve_points
from ..reporting.formatting import SPACE, time_unit
from ..reporting.plots import PLOTS, plot_style
from ..reporting.svg import LIGHT
from .runs import Outcome
from .segments import Row, split_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {curve.label: curve for plot in PLOTS if plot.name == "accuracy" for curve in plot.curves}
ACCURACY, TRAINING = CURVES["validation accuracy"], CURVES["training accuracy"]
TRAINING_LOOK: dict[str, Any] = {"linestyle": ":", "linewidth": 1.0}
IDEAL: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": ":"}


def write_plot(rows: Sequence[Row], scales: Mapping[int, Sequence[Outcome]], folder: Path) -> None:
    """Write scaling.png and scaling.pdf.

    Args:
        rows: Rows of the table.
        scales: The runs on each number of ranks.
        folder: Folder to which the files are written.
    """
    from matplotlib.figure import Figure

    colours = {ranks: LIGHT[f"c{i % 6}"] for i, ranks in enumerate(sorted({row.ranks for row in rows} | set(scales)))}
    with plot_style():
        figure = Figure(figsize=(9.0, 7.2), layout="constrained")
        (speed, efficiency), (by_epoch, by_time) = figure.subplots(2, 2)
        _draw_speed(speed, efficiency, rows, colours)
        _draw_accuracy(by_epoch, by_time, scales, colours)
        handles, labels = by_epoch.get_legend_handles_labels()
        if handles:
            figure.legend(
                handles, labels, loc="outside lower left", ncols=max(1, 105 // max(6 + len(x) for x in labels))
            )
        for suffix, settings in ((".png", {"dpi": 150}), (".pdf", {"metadata": {"CreationDate": None}})):
            with atomic_write(folder / f"scaling{suffix}") as file:
                figure.savefig(file, format=suffix[1:], **settings)


def _draw_speed(speed: Axes, efficiency: Axes, rows: Sequence[Row], colours: Mapping[int, str]) -> None:
    rated = [row for row in rows if row.images_per_s.num]
    for row in rated:
        look: dict[str, Any] = {"color": colours[row.ranks], "marker": "o", "markerfacecolor": None, "linestyle": ""}
        if row.segment:
            look["markerfacecolor"] = LIGHT["paper"]
        sample = row.images_per_s
        error = sample.std if sample.std > 0 else None
        speed.errorbar(row.ranks, sample.mean, error, **look, capsize=4)
        relative = error and row.efficiency * error / sample.mean
        efficiency.errorbar(row.ranks, row.efficiency, relative, **look, capsize=4)
    ticks = sorted(colours)
    reference = next((row for row in rated if not row.segment), None)
    if reference is not None:
        ideal = [reference.images_per_s_per_rank * ranks for ranks in ticks]
        speed.plot(ticks, ideal, **IDEAL, label="ideal")
        efficiency.plot(ticks, [1.0] * len(ticks), **IDEAL)
        speed.legend(loc="upper left")
    if any(row.segment for row in rated):
        note = "hollow: part of a run that was\nresumed on another number of ranks"
        efficiency.text(0.03, 0.04, note, transform=efficiency.transAxes, color=LIGHT["muted"], fontsize=8)
    for axes, label in ((speed, "images/s"), (efficiency, "efficiency")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(ranks) for ranks in ticks])
        axes.minorticks_off()
        axes.margins(x=0.15)
        axes.set(xlabel="ranks", ylabel=label)
    speed.set_yscale("log", base=2)  # on which the ideal is a straight line
    speed.yaxis.set_major_formatter(lambda value, _position: f"{value:,.4g}")
    efficiency.set_ylim(0)
    for ranks in {row.ranks for row in rows if not row.segment} - {row.ranks for row in rated}:
        look = {"color": LIGHT["c1"], "ha": "center", "va": "bottom", "rotation": 90}
        speed.text(ranks, 0.03, "no whole run", **look, transform=speed.get_xaxis_transform())
    efficiency.yaxis.set_major_formatter(_percent)


def _draw_accuracy(
    by_epoch: Axes, by_time: Axes, scales: Mapping[int, Sequence[Outcome]], colours: Mapping[int, str]
) -> None:
    drawn = [(ranks, outcome) for ranks, outcomes in scales.items() for outcome in outcomes if outcome.run]
    seconds = [point.elapsed_s for _, outcome in drawn for point in curve_points(_run(outcome), ACCURACY)]
    unit_s, unit = time_unit(max(seconds, default=0.0))
    labelled: set[str] = set()
    has_training = False
    for ranks, outcome in drawn:
        sizes = [part.ranks for part in split_run(_run(outcome))]
        is_changed = sizes != [ranks]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        if is_changed:
            label = f"{outcome.name} of ranks-{ranks}, on {', then '.join(map(str, sizes))}"
        points = curve_points(_run(outcome), ACCURACY)
        look: dict[str, Any] = {"color": colours[ranks], "linestyle": "--" if is_changed else "-", "linewidth": 1.2}
        look |= {"marker": "o", "markersize": 3, "markevery": 0.05 if len(points) > 1 else 1}
        values = [point.value for point in points]
        shown = label if label not in labelled else None
        by_epoch.plot([point.epoch for point in points], values, **look, label=shown)
        by_time.plot([point.elapsed_s / unit_s for point in points], values, **look)
        labelled.add(label)
        points = curve_points(_run(outcome), TRAINING)
        look = {"color": colours[ranks], **TRAINING_LOOK, "marker": "." if len(points) == 1 else ""}
        values = [point.value for point in points]
        by_epoch.plot([point.epoch for point in points], values, **look)
        by_time.plot([point.elapsed_s / unit_s for point in points], values, **look)
        has_training |= bool(points)
    if has_training:
        by_epoch.plot([], [], color=LIGHT["muted"], **TRAINING_LOOK, label="training accuracy")
    for axes in (by_epoch, by_time):
        axes.yaxis.set_major_formatter(_percent)
        axes.set(xlim=(0, None))
    by_epoch.set(xlabel="epoch", ylabel="accuracy")
    by_time.set(xlabel=f"time ({unit})")


def _run(outcome: Outcome) -> Any:
    return outcome.run


def _percent(value: float, _position: float) -> str:
    return f"{100 * value:.4g}{SPACE}%"
