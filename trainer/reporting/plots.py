"""The report's plots: each drawn once, and written as PNG, as PDF, below pages of text, and as SVG for the page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from datapipe.fsio import atomic_write

from .curves import PLOTS, Plot, Point, curve_points
from .formatting import format_figure, format_percent, format_value, time_unit
from .runlog import Run, number, seconds_of
from .svg import LIGHT, svg_for_page

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure

Tables = Mapping[str, Mapping[str, str]]  # values by name, by title

_WIDE, _NARROW = 9.0, 4.5  # inches; the narrow one, for a narrow screen, has its halves below each other
_LEGEND_COLUMNS = 11.5  # characters of an inch that fit beside each other
_NAME_WIDTH, _VALUE_WIDTH, _NUM_LINES = 28, 84, 76  # what fits on a page of text, in letters and lines
_PAGE_INCHES = 9.0, 11.0
_MAX_RANKS = 32  # of which the time is shown
_UNDATED: dict[str, Any] = {"CreationDate": None}  # a PDF's metadata, so that the same plot is the same file

PARTS = {  # of a run's time: colour and label
    "staging": ("c6", "staging"),
    "start": ("c7", "start"),
    "compile": ("c8", "compilation"),
    "wait": ("c1", "wait for data"),
    "forward_backward": ("c0", "forward + backward"),
    "optimizer": ("c4", "optimizer"),
    "evaluation": ("c2", "evaluation"),
    "checkpoint": ("c3", "checkpoint"),
    "other": ("c5", "other"),
}


@dataclass(frozen=True)
class Drawing:
    """A plot as it stands in the page, for a wide and for a narrow screen."""

    title: str
    wide: str
    narrow: str


def write_plots(runs: list[Run], tables_by_heading: Mapping[str, Tables], out: Path) -> list[Drawing]:
    """Draw those of PLOTS that have something to show.

    Args:
        runs: Runs that they show.
        tables_by_heading: Text for the first pages of report.pdf.
        out: Folder for report.pdf, and a PNG and a PDF of each; those of an earlier report that are not drawn are
            removed.

    Returns:
        The plots, for the page.
    """
    from matplotlib.backends.backend_pdf import PdfPages

    drawings: list[Drawing] = []
    shown = [plot for plot in PLOTS if _has_content(plot, runs)]
    for plot in PLOTS:
        if plot not in shown:
            for suffix in (".png", ".pdf"):
                (out / f"{plot.name}{suffix}").unlink(missing_ok=True)  # of an earlier report
    with ExitStack() as stack:
        stack.enter_context(plot_style())
        file = stack.enter_context(atomic_write(out / "report.pdf", alone=False))
        pdf = stack.enter_context(PdfPages(file, metadata=_UNDATED))
        for page in draw_text_pages(tables_by_heading):
            pdf.savefig(page)
        for plot in shown:
            wide, narrow = (_draw(plot, runs, width) for width in (_WIDE, _NARROW))
            pdf.savefig(wide)
            with atomic_write(out / f"{plot.name}.png", alone=False) as image:
                wide.savefig(image, format="png", dpi=150)
            with (
                atomic_write(out / f"{plot.name}.pdf", alone=False) as image,
                PdfPages(image, metadata=_UNDATED) as page_alone,
            ):
                page_alone.savefig(wide)
            drawings.append(Drawing(plot.title, *(_svg(figure, plot.title) for figure in (wide, narrow))))
    return drawings


def _has_content(plot: Plot, runs: list[Run]) -> bool:
    """Return whether the runs have what a plot shows."""
    if plot.name == "time":
        return any(any(run.time_s().values()) for run in runs)
    if plot.name == "ranks":
        return len(runs) == 1 and len(runs[0].ranks()) > 1
    return any(curve_points(run, curve) for run in runs for curve in plot.curves)


def _svg(figure: Figure, title: str) -> str:
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return svg_for_page(svg.getvalue(), title)


def plot_style() -> AbstractContextManager[None]:
    """Set how matplotlib draws, until the block ends; return that block's context."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": LIGHT["line"],
            "axes.grid": True,
            "axes.labelcolor": LIGHT["muted"],
            "axes.spines.right": False,
            "axes.spines.top": False,
            "grid.color": LIGHT["line"],
            "legend.columnspacing": 1.4,
            "legend.frameon": False,
            "legend.handlelength": 1.6,
            "lines.markersize": 4.5,
            "pdf.fonttype": 42,
            "svg.fonttype": "none",
            "svg.hashsalt": "report",
            "text.color": LIGHT["ink"],
            "text.parse_math": False,
            "xtick.color": LIGHT["muted"],
            "ytick.color": LIGHT["muted"],
        }
    )


def _draw(plot: Plot, runs: list[Run], width: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure()
    if plot.curves:
        rows = 1 if width == _WIDE else 2
        figure.set_size_inches(width, 3.4 * rows + 0.1 * len(runs))
        handles = _draw_curves(figure, plot, runs, rows)
    else:
        bars = {run.label: run.time_s() for run in runs} if plot.name == "time" else _times_of_ranks(runs[0])
        has_long_names = plot.name == "time" and len(runs) > 1
        figure.set_size_inches(width, (1.3 if width == _WIDE else 1.9) + (0.65 if has_long_names else 0.4) * len(bars))
        handles = _draw_time(figure, bars, has_long_names)
    if handles:
        fitting = _LEGEND_COLUMNS * width
        widths = [len(str(handle.get_label())) + 6 for handle in handles]
        columns = len(handles) if sum(widths) <= fitting else max(1, int(fitting // max(widths)))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    ConstrainedLayoutEngine().execute(figure)  # once, for all files; for a figure that has it, each would draw twice
    return figure


def _draw_curves(figure: Figure, plot: Plot, runs: list[Run], rows: int) -> list[Artist | Container]:
    """Draw a plot's curves by epoch and by time; return what the legend shows."""
    by_epoch, by_time = figure.subplots(rows, 2 // rows, sharey=True)
    seconds = [number(line.get("elapsed_s"), 0.0) for run in runs for line in run.train + run.epochs]
    unit_s, unit = time_unit(max(seconds, default=0.0))
    handles: list[Artist | Container] = []
    for i, run in enumerate(runs):
        look: dict[str, Any] = {"color": LIGHT[f"c{i % 6}"], "marker": "os^DvPX"[i % 7]}
        if len(runs) > 1:
            handles += by_epoch.plot([], [], **look, label=run.label)
        for curve in plot.curves:
            points = curve_points(run, curve)
            # As a part of the plot's diagonal, so that markers keep their distance; a single point would get none.
            style = look | {"markevery": 0.03 if len(points) > 1 else 1} | curve.style
            style |= {"marker": look["marker"]} if len(points) == 1 else {}  # a line of one point is none
            draw_curve(by_epoch, by_time, points, unit_s, style)
    by_epoch.set(xlabel="epoch", ylabel=plot.label, xlim=(0, None))
    by_time.set(xlabel=f"time ({unit})", xlim=(0, None), ylabel=plot.label if rows > 1 else "")
    grey: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": ":"}
    if plot.name == "accuracy":
        by_epoch.yaxis.set_major_formatter(format_percent)
        targets = {run.figures()["target"] for run in runs}
        for target in sorted(target for target in targets if target > 0):
            text = f"target {format_figure(target, '{:.1%}')}"
            lines = [axes.axhline(target, **grey, label=text) for axes in (by_epoch, by_time)]
            handles.append(lines[0])
    if plot.name == "throughput":
        by_epoch.set_ylim(0, 1.05 * by_epoch.get_ylim()[1])
    for curve in plot.curves:
        if curve.label and any(curve_points(run, curve) for run in runs):
            handles += by_epoch.plot([], [], **grey | curve.style, label=curve.label)
    return handles


def draw_curve(
    by_epoch: Axes, by_time: Axes, points: list[Point], unit_s: float, look: dict[str, Any], label: str | None = None
) -> None:
    """Draw a curve on two axes.

    Args:
        by_epoch: Axes of values by epoch.
        by_time: Axes of values by time.
        points: Points of the curve.
        unit_s: Unit of time, in seconds.
        look: Style of the line and its markers, as of `Axes.plot`.
        label: Name of the curve in the legend; None: it has none.
    """
    values = [point.value for point in points]
    by_epoch.plot([point.epoch for point in points], values, **look, label=label)
    by_time.plot([point.elapsed_s / unit_s for point in points], values, **look)


def _times_of_ranks(run: Run) -> dict[str, dict[str, float]]:
    """Return each rank's seconds in each section; of many ranks those that waited for data the shortest and longest."""
    ranks = sorted(run.ranks(), key=lambda rank: number(rank.get("wait_share"), 0.0))
    if len(ranks) > _MAX_RANKS:
        ranks = ranks[: _MAX_RANKS // 2] + ranks[-_MAX_RANKS // 2 :]
    ranks.sort(key=lambda rank: number(rank.get("rank"), 0.0))
    return {f"rank {format_value(rank.get('rank'))}": seconds_of([rank]) for rank in ranks}


def _draw_time(figure: Figure, times: dict[str, dict[str, float]], has_long_names: bool) -> list[Artist | Container]:
    """Draw a bar for each entry, of the PARTS that took time in any; return what the legend shows.

    Long names stand above their bars. A single bar needs none.
    """
    axes: Axes = figure.subplots()
    totals = [sum(time_s.values()) for time_s in times.values()]
    longest = max(totals)
    unit_s, unit = time_unit(longest)
    left, height = [0.0] * len(times), 0.4 if has_long_names else 0.6
    least = longest / (2.4 * figure.get_figwidth())  # of a bar in which its share fits
    handles: list[Artist | Container] = []
    for part, (colour, label) in PARTS.items():
        widths = [time_s[part] / unit_s for time_s in times.values()]
        if not any(widths):
            continue
        bars = axes.barh(range(len(times)), widths, height, left, color=LIGHT[colour], label=label)
        handles.append(bars)
        left = [start + width for start, width in zip(left, widths, strict=True)]
        shares = [
            format_figure(time_s[part] / total, "{:.0%}") if time_s[part] > least else ""
            for time_s, total in zip(times.values(), totals, strict=True)
        ]
        axes.bar_label(bars, shares, label_type="center", color="black" if colour == "c4" else LIGHT["paper"])
    axes.set(xlabel=f"time ({unit})", yticks=range(len(times)), yticklabels=[*times])
    axes.set(xlim=(0, None), ylim=(len(times) - 0.6, -0.5))  # the first on top
    if has_long_names or len(times) == 1:
        axes.set_yticks([])
    for i, name in enumerate(times if has_long_names else ()):
        axes.text(0, i - height / 2 - 0.05, name, color=LIGHT["muted"], va="bottom")
    axes.grid(visible=False, axis="y")
    return handles


def draw_text_pages(tables_by_heading: Mapping[str, Tables]) -> Iterator[Figure]:
    """Yield as many pages of text as tables take; those below each heading begin on a page of their own."""
    from matplotlib.figure import Figure

    for heading, tables in tables_by_heading.items():
        lines = _lay_out(tables)
        for first in range(0, len(lines), _NUM_LINES):
            figure = Figure(figsize=_PAGE_INCHES)
            figure.text(0.05, 0.97, heading, va="top", weight="bold")
            text = "\n".join(lines[first : first + _NUM_LINES])
            figure.text(0.05, 0.94, text, va="top", family="monospace", size=8, linespacing=1.2)
            yield figure


def _lay_out(tables: Tables) -> list[str]:
    """Return the lines of some tables: a title, and below it names with their values, which may take several lines."""
    lines: list[str] = []
    for title, table in tables.items():
        lines += ["", title] if lines else [title]
        for name, value in table.items():
            columns = wrap(name, _NAME_WIDTH) or [""], wrap(value, _VALUE_WIDTH)
            for left, right in zip_longest(*columns, fillvalue=""):
                lines.append(f"  {left:{_NAME_WIDTH}}  {right}".rstrip())
    return lines
