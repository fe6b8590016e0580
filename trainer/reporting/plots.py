"""The report's plots: each drawn once, and written as PDF, as PNG, and as SVG for the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree

from datapipe.fsio import atomic_write

from .formatting import SPACE, format_figure, time_unit
from .runlog import Line, Run, number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure

MAX_POINTS = 400  # of a curve: more cannot be told apart on the page
WIDTH = 9.0  # inches
LEGEND_COLUMNS = 105  # characters that fit beside each other

LIGHT = {  # after Okabe and Ito (2008), whose hues colour-blind readers tell apart
    "c0": "#0072b2",
    "c1": "#c24e00",
    "c2": "#00855f",
    "c3": "#a8467f",
    "c4": "#d99a00",
    "c5": "#6b7683",
    "c6": "#7a5a2f",
    "c7": "#5648a8",
    "c8": "#b3261e",
    "ink": "#1c2126",
    "muted": "#59636e",
    "line": "#dde1e6",
    "paper": "#ffffff",
}
DARK = {
    "c0": "#5ab4ee",
    "c1": "#f58a4b",
    "c2": "#3cc79a",
    "c3": "#e08fbd",
    "c4": "#ffd166",
    "c5": "#98a3af",
    "c6": "#cfa56b",
    "c7": "#aca2f5",
    "c8": "#ff8f85",
    "ink": "#e4e8ec",
    "muted": "#a0aab4",
    "line": "#363d45",
    "paper": "#15191d",
}
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


class Curve(NamedTuple):
    """One curve per run: a key of the lines of metrics.jsonl, and how it is drawn."""

    key: str
    lines: Literal["train", "epochs"]
    style: dict[str, Any]
    label: str = ""  # in the legend


@dataclass(frozen=True)
class Plot:
    """A plot of all runs. Without curves, it shows where the time went."""

    name: str
    title: str
    label: str = ""  # of the vertical axis
    curves: Sequence[Curve] = ()


@dataclass(frozen=True)
class Drawing:
    """A plot as it stands in the page."""

    title: str
    svg: str


PLOTS = (
    Plot("accuracy", "Accuracy", "validation accuracy", [Curve("val_accuracy", "epochs", {})]),
    Plot(
        "loss",
        "Loss",
        "loss",
        [
            Curve("loss", "train", {"marker": "", "linestyle": "-"}, "training"),
            Curve("val_loss", "epochs", {"linestyle": "--"}, "validation"),
        ],
    ),
    Plot("throughput", "Speed", "images/s", [Curve("images_per_s", "train", {"marker": ""})]),
    Plot("time", "Where the time went"),
)


def write_plots(runs: list[Run], out: Path) -> list[Drawing]:
    """Draw PLOTS; write them to `out` as report.pdf and as one PNG each; return them for the page."""
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    drawings = []
    with ExitStack() as stack:
        stack.enter_context(plot_style())
        file = stack.enter_context(atomic_write(out / "report.pdf"))
        pdf = stack.enter_context(PdfPages(file, metadata={"CreationDate": None}))
        for plot in PLOTS:
            figure = Figure(layout="constrained")
            _draw(figure, plot, runs)
            pdf.savefig(figure)
            figure.set_layout_engine("none")  # it is laid out once, for all three files
            with atomic_write(out / f"{plot.name}.png") as image:
                figure.savefig(image, format="png", dpi=150)
            svg = io.BytesIO()
            figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
            drawings.append(Drawing(plot.title, _svg_for_page(svg.getvalue(), plot.title)))
    return drawings


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


def _draw(figure: Figure, plot: Plot, runs: list[Run]) -> None:
    if plot.curves:
        figure.set_size_inches(WIDTH, 3.4 + 0.1 * len(runs))
        handles = _draw_curves(figure, plot, runs)
    else:
        figure.set_size_inches(WIDTH, 1.3 + 0.45 * len(runs))
        handles = _draw_time(figure, runs)
    if handles:
        widths = [len(str(handle.get_label())) + 6 for handle in handles]
        columns = len(handles) if sum(widths) <= LEGEND_COLUMNS else max(1, LEGEND_COLUMNS // max(widths))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def _draw_curves(figure: Figure, plot: Plot, runs: list[Run]) -> list[Artist | Container]:
    """Draw a plot's curves by epoch and by time; return what the legend shows."""
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
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
            values = [point.value for point in points]
            by_epoch.plot([point.epoch for point in points], values, **style)
            by_time.plot([point.elapsed_s / unit_s for point in points], values, **style)
    by_epoch.set(xlabel="epoch", ylabel=plot.label, xlim=(0, None))
    by_time.set(xlabel=f"time ({unit})", xlim=(0, None))
    grey: dict[str, Any] = {"color": LIGHT["muted"], "linestyle": ":"}
    if plot.name == "accuracy":
        by_epoch.yaxis.set_major_formatter(lambda value, _position: f"{100 * value:.4g}{SPACE}%")
        targets = {run.figures()["target"] for run in runs}
        for target in sorted(target for target in targets if target > 0):
            text = f"target {format_figure(target, '{:.1%}')}"
            lines = [axes.axhline(target, **grey, label=text) for axes in (by_epoch, by_time)]
            handles.append(lines[0])
    if plot.name == "throughput":
        by_epoch.set_ylim(0)
    for curve in plot.curves:
        if curve.label:
            handles += by_epoch.plot([], [], **grey | curve.style, label=curve.label)
    return handles


class Point(NamedTuple):
    """A point of a curve, on both of its axes."""

    epoch: float
    elapsed_s: float
    value: float


def curve_points(run: Run, curve: Curve) -> list[Point]:
    """Return at most MAX_POINTS points of a curve, evenly chosen; lines without a number are left out."""
    lines: list[Line] = run.train if curve.lines == "train" else run.epochs
    steps_per_epoch = _steps_per_epoch(run)
    points = []
    for line in lines:
        step, elapsed_s, value = (number(line.get(key)) for key in ("step", "elapsed_s", curve.key))
        if not any(map(math.isnan, (step, elapsed_s, value))):
            points.append(Point(step / steps_per_epoch, elapsed_s, value))
    return points[:: len(points) // MAX_POINTS + 1]


def _steps_per_epoch(run: Run) -> float:
    """Return what the first epoch's line says, or the header where there is none yet; NaN where unknown."""
    if run.epochs:
        steps, epochs = number(run.epochs[0].get("step")), number(run.epochs[0].get("epoch"))
    else:
        steps, epochs = number(run.header.get("train_samples")), number(run.header.get("global_batch_size"))
    return steps / epochs if steps and epochs else math.nan


def _draw_time(figure: Figure, runs: list[Run]) -> list[Artist | Container]:
    """Draw a bar for each run, of the PARTS that took time in any; return what the legend shows."""
    axes: Axes = figure.subplots()
    times = [run.time_s() for run in runs]
    totals = [sum(time_s.values()) for time_s in times]
    longest = max(totals)
    unit_s, unit = time_unit(longest)
    left = [0.0] * len(runs)
    handles: list[Artist | Container] = []
    for part, (colour, label) in PARTS.items():
        widths = [time_s[part] / unit_s for time_s in times]
        if not any(widths):
            continue
        bars = axes.barh(range(len(runs)), widths, 0.6, left, color=LIGHT[colour], label=label)
        handles.append(bars)
        left = [start + width for start, width in zip(left, widths, strict=True)]
        shares = [
            format_figure(time_s[part] / total, "{:.0%}") if time_s[part] > longest / 22 else ""  # if it fits
            for time_s, total in zip(times, totals, strict=True)
        ]
        axes.bar_label(bars, shares, label_type="center", color="black" if colour == "c4" else LIGHT["paper"])
    axes.set(xlabel=f"time ({unit})", yticks=range(len(runs)), yticklabels=[run.label for run in runs])
    axes.set(xlim=(0, None), ylim=(len(runs) - 0.5, -0.5))  # the first run on top
    axes.grid(visible=False, axis="y")
    return handles


def _svg_for_page(svg: bytes, title: str) -> str:
    """Return matplotlib's SVG as an element of an HTML page: without namespaces, in the page's colours."""
    root = ElementTree.fromstring(svg)
    values = [value for element in root.iter() for value in element.attrib.values()]
    references = {name for value in values for name in re.findall(r"#(\w+)", value)}
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): _use_variables(value) for name, value in element.attrib.items()}
        if attributes.get("id") not in references:
            attributes.pop("id", None)
        element.attrib.clear()
        element.attrib.update(attributes)
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    root.attrib |= {"role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _use_variables(value: str) -> str:
    """Write the page's variables in place of colours."""
    for name, colour in LIGHT.items():
        value = value.replace(colour, f"var(--{name})")
    return value
