"""Draw bars and curves as SVG, for light and for dark pages, with a transparent background."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Hues that colour-blind readers tell apart (Okabe and Ito 2008), on white and, lighter, on black.
THEMES = {
    "light": {"ink": "#24292f", "muted": "#59636e", "grid": "#d8dde3", "other": "#98a3af",
              "hues": ("#0072b2", "#c24e00", "#00855f", "#a8467f", "#b37d00", "#59636e", "#7a5cc0")},
    "dark": {"ink": "#e4e8ec", "muted": "#a0aab4", "grid": "#3a424b", "other": "#6b7683",
             "hues": ("#5ab4ee", "#f58a4b", "#3cc79a", "#e08fbd", "#ffd166", "#a0aab4", "#b7a3f0")},
}  # fmt: skip
INCHES = 5.6  # wide: a phone shows it at half its size, and can still be read
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Bar:
    """A value, and between which values its repetitions lay (None: there were none)."""

    name: str
    value: float | None  # None: `note` says why there is none
    low: float | None = None
    high: float | None = None
    is_ours: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars that begin at zero. `form` prints a value; `is_better`: "more" or "less"."""

    title: str
    unit: str
    bars: list[Bar]
    is_better: str
    form: str = ",.0f"


@dataclass(frozen=True)
class Line:
    """A curve: `values[i]` at `places[i]`, with the least and greatest repetition where there are several."""

    name: str
    places: list[float]
    values: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Lines:
    """Curves, over a logarithmic axis if they span a factor of ten. `level`: a horizontal line, with its name."""

    title: str
    across: str
    up: str
    lines: list[Line]
    is_log: bool = True
    level: tuple[str, float] | None = None


@dataclass(frozen=True)
class Plot:
    """A figure: its panels, one below the other, and the line about the machine and the repetitions."""

    panels: list[Bars | Lines]
    note: str


def draw(plot: Plot, theme: str) -> str:
    """Return a figure as SVG text."""
    colours = THEMES[theme]
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "figures", "font.family": "DejaVu Sans", "font.size": 10.5,
        "text.color": colours["ink"], "axes.labelcolor": colours["muted"], "axes.edgecolor": colours["grid"],
        "xtick.color": colours["muted"], "ytick.color": colours["ink"], "text.parse_math": False,
    })  # fmt: skip
    heights = [0.95 + 0.27 * len(panel.bars) if isinstance(panel, Bars) else 3.0 for panel in plot.panels]
    figure = Figure(figsize=(INCHES, sum(heights) + 0.35), layout=ConstrainedLayoutEngine(w_pad=0.1))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, panel in zip(parts, plot.panels, strict=True):
        ax = part.subplots()
        (_draw_bars if isinstance(panel, Bars) else _draw_lines)(ax, panel, colours)
        part.suptitle(panel.title, fontsize=11, fontweight="bold", x=0.01, ha="left", color=colours["ink"])
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(plot.note, fontsize=8.5, color=colours["muted"], x=0.01, ha="left")
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue().replace("'DejaVu Sans'", FONTS.replace('"', "'"))
    head, marker, rest = svg.partition("<svg ")
    return f"{head}<!-- data: {checksum(plot)} -->\n{marker}{rest}"


def _draw_bars(ax: Axes, panel: Bars, colours: Mapping[str, Any]) -> None:
    end = max(bar.high or bar.value or 0.0 for bar in panel.bars)
    for place, bar in enumerate(panel.bars):
        value = bar.value or 0.0
        ax.barh(place, value, 0.62, color=colours["hues"][0] if bar.is_ours else colours["other"])
        if bar.low is not None and bar.high is not None:
            ends = [[value - bar.low], [bar.high - value]]
            ax.errorbar(value, place, xerr=ends, color=colours["ink"], linewidth=1.1, capsize=2.5)
        text = bar.note if bar.value is None else f"{value:{panel.form}}{bar.note}"
        ax.text(max(value, bar.high or 0.0) + 0.015 * end, place, text, va="center", fontsize=9.5)
    ax.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    ax.set_ylim(len(panel.bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.17 * end)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=9)
    ax.grid(axis="x", color=colours["grid"], linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines["left"].set_color(colours["muted"])
    ax.set_xlabel(f"{panel.unit} ({panel.is_better} is better)", fontsize=9.5)


def _draw_lines(ax: Axes, panel: Lines, colours: Mapping[str, Any]) -> None:
    for line, colour, marker in zip(panel.lines, colours["hues"], "os^Dv", strict=False):
        ax.plot(line.places, line.values, color=colour, marker=marker, markersize=5, label=line.name)
        if line.low is not None and line.high is not None:
            ends = [[v - low for v, low in zip(line.values, line.low, strict=True)],
                    [high - v for v, high in zip(line.values, line.high, strict=True)]]  # fmt: skip
            ax.errorbar(line.places, line.values, yerr=ends, color=colour, linewidth=0, elinewidth=1.1, capsize=2.5)
    if panel.level is not None:
        name, height = panel.level
        ax.axhline(height, color=colours["muted"], linestyle="--", linewidth=1.2, label=name)
    places = [place for line in panel.lines for place in line.places]
    ax.set_xscale("log" if max(places) >= 10 * min(places) else "linear")
    ax.xaxis.set_major_formatter("{x:,g}")
    if panel.is_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:,g}")
    ax.set_xlabel(panel.across, fontsize=9.5)
    ax.set_ylabel(panel.up, fontsize=9.5)
    ax.tick_params(labelsize=9, labelcolor=colours["muted"])
    ax.grid(color=colours["grid"], linewidth=0.7)
    ax.legend(frameon=False, fontsize=9.5, labelcolor=colours["ink"])


def checksum(plot: Plot) -> str:
    """Compute a checksum of what a plot shows, whatever draws it."""
    return hashlib.sha256(json.dumps(asdict(plot), sort_keys=True).encode()).hexdigest()[:16]
