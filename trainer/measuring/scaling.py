"""How training scales over ranks, from the repeats that tools/scaling.sh made on each number of them.

    python -m trainer.measuring.scaling FOLDER

FOLDER holds the repeats of each number of ranks in ranks-N. Writes scaling.txt, .csv, .json, .png and .pdf beside them.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datapipe import console
from datapipe.errors import DatapipeError
from datapipe.fsio import atomic_write

from ..reporting.curves import PLOTS, curve_points
from ..reporting.formatting import DASH, format_figure, format_percent, time_unit
from ..reporting.plots import draw_curve, plot_style
from ..reporting.runlog import finite
from ..reporting.svg import LIGHT
from .runs import Outcome, check_comparable, is_seed, read_group
from .segments import Row, split_run, tabulate
from .tables import format_table, to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIGURES = {  # of a row: how it is called and written
    "images_per_s": ("images/s", "{:,.0f}"),
    "std": ("std", "{:,.0f}"),
    "speed_up": ("speed-up", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "images_per_s_per_rank": ("per rank", "{:,.0f}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "time_to_target_s": ("to target, s", "{:,.1f}"),
}
_TRAINING, _VALIDATION = next(plot.curves for plot in PLOTS if plot.name == "accuracy")
_TRAINING_LOOK: dict[str, Any] = {"linestyle": ":", "linewidth": 1.0}
_IDEAL: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": ":"}


def read_scales(folder: Path) -> dict[int, list[Outcome]]:
    """Read the repeats on each number of ranks, from the folders ranks-N.

    Raises:
        DatapipeError: There is none, or one cannot be read.
        SettingError: Their targets or data sets differ.
    """
    scales: dict[int, list[Outcome]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch("ranks-([1-9][0-9]{0,8})", path.name)
        if match and path.is_dir():
            has_runs = any(map(is_seed, path.iterdir()))
            scales[int(match[1])] = read_group(path).outcomes if has_runs else []
    if not scales:
        raise DatapipeError("holds no folder ranks-N with runs", path=folder)
    scales = dict(sorted(scales.items()))
    check_comparable({f"ranks-{ranks}": outcomes for ranks, outcomes in scales.items()})
    return scales


def _figures(row: Row) -> dict[str, float]:
    sample = row.images_per_s
    known = {"images_per_s": sample.mean, "std": sample.std, "images_per_s_per_rank": row.images_per_s_per_rank}
    return {key: known[key] if key in known else getattr(row, key) for key in _FIGURES}


def _format_rows(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    cells = []
    for row in rows:
        figures = _figures(row)
        nodes = DASH if row.nodes is None else str(row.nodes)
        texts = [format_figure(figures[key], form) for key, (_, form) in _FIGURES.items()]
        ranks = f"{row.ranks}" if not row.segment else f"  {row.ranks}: {row.segment}"
        cells.append([ranks, nodes, str(row.num_runs), *texts, row.note])
    heads = [name for name, _ in _FIGURES.values()]
    return format_table(["ranks", "nodes", "runs", *heads, "note"], cells) + "\n"


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["ranks", "segment", "nodes", "runs", *_FIGURES, "note"])
    for row in rows:
        figures = finite(_figures(row)).values()
        writer.writerow([row.ranks, row.segment, row.nodes, row.num_runs, *figures, row.note])
    return text.getvalue()


def write_scaling(folder: Path) -> tuple[str, int]:
    """Write the table and the plot of a folder; return the table, and the exit code: 1 where a run has not finished."""
    scales = read_scales(folder)
    rows = tabulate(scales)
    table = _format_rows(rows)
    for suffix, text in (
        (".txt", table),
        (".csv", _csv(rows)),
        (".json", to_json({"rows": [asdict(row) for row in rows]}) + "\n"),
    ):
        with atomic_write(folder / f"scaling{suffix}") as file:
            file.write(text.encode())
    _write_plot(rows, scales, folder)
    is_whole = all(outcomes and all(outcome.is_finished for outcome in outcomes) for outcomes in scales.values())
    return table, int(not is_whole)


def _write_plot(rows: Sequence[Row], scales: Mapping[int, Sequence[Outcome]], folder: Path) -> None:
    """Write scaling.png and scaling.pdf: images/s and efficiency beside the ideal, and accuracies."""
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
        speed.plot(ticks, ideal, **_IDEAL, label="ideal")
        efficiency.plot(ticks, [1.0] * len(ticks), **_IDEAL)
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
    efficiency.yaxis.set_major_formatter(format_percent)


def _draw_accuracy(
    by_epoch: Axes, by_time: Axes, scales: Mapping[int, Sequence[Outcome]], colours: Mapping[int, str]
) -> None:
    """Draw the accuracy of validation and of training, by epoch and by time."""
    runs = [
        (ranks, outcome.name, outcome.run) for ranks, outcomes in scales.items() for outcome in outcomes if outcome.run
    ]
    seconds = [point.elapsed_s for *_, run in runs for point in curve_points(run, _VALIDATION)]
    unit_s, unit = time_unit(max(seconds, default=0.0))
    labelled: set[str] = set()
    has_training = False
    for ranks, name, run in runs:
        sizes = [part.ranks for part in split_run(run)]
        is_changed = sizes != [ranks]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        if is_changed:
            label = f"{name} of ranks-{ranks}, on {', then '.join(map(str, sizes))}"
        points = curve_points(run, _VALIDATION)
        look: dict[str, Any] = {"color": colours[ranks], "linestyle": "--" if is_changed else "-", "linewidth": 1.2}
        look |= {"marker": "o", "markersize": 3, "markevery": 0.05 if len(points) > 1 else 1}
        draw_curve(by_epoch, by_time, points, unit_s, look, label if label not in labelled else None)
        labelled.add(label)
        points = curve_points(run, _TRAINING)
        look = {"color": colours[ranks], **_TRAINING_LOOK, "marker": "." if len(points) == 1 else ""}
        draw_curve(by_epoch, by_time, points, unit_s, look)
        has_training |= bool(points)
    if has_training:
        by_epoch.plot([], [], color=LIGHT["muted"], **_TRAINING_LOOK, label="training accuracy")
    for axes in (by_epoch, by_time):
        axes.yaxis.set_major_formatter(format_percent)
        axes.set(xlim=(0, None))
    by_epoch.set(xlabel="epoch", ylabel="accuracy")
    by_time.set(xlabel=f"time ({unit})")


def main() -> int:
    """Run the command line; return its exit code."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs every glyph of the PDF
    parser = argparse.ArgumentParser(prog="python -m trainer.measuring.scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what tools/scaling.sh wrote to")

    def command() -> None:
        table, code = write_scaling(parser.parse_args().folder)
        print(table, end="", flush=True)
        raise SystemExit(code)

    return console.run(command)


if __name__ == "__main__":
    sys.exit(main())
