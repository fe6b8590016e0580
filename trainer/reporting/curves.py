"""What the plots show: their curves, each a figure of a run's lines, and its points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .runlog import Line, Run, number

MAX_POINTS = 300  # of a curve: more cannot be told apart on the page


class Curve(NamedTuple):
    """One curve per run: a key of the lines of metrics.jsonl, and how it is drawn."""

    key: str
    lines: Literal["train", "epochs", "kfac"]
    style: dict[str, Any]
    label: str = ""  # in the legend
    by_epoch: str = ""  # key of an epoch's line with the same figure, which is shown where there are more epochs


@dataclass(frozen=True)
class Plot:
    """A plot of all runs; a curve that no run has is left out. Without curves, it shows where the time went."""

    name: str
    title: str
    label: str = ""  # of the vertical axis
    curves: Sequence[Curve] = ()


class Point(NamedTuple):
    """A point of a curve, on both of its axes."""

    epoch: float
    elapsed_s: float
    value: float


PLOTS = (
    Plot(
        "accuracy",
        "Accuracy",
        "accuracy",
        [
            Curve("train_accuracy", "epochs", {"marker": "", "linestyle": "-"}, "training accuracy"),
            Curve("val_accuracy", "epochs", {"linestyle": "--"}, "validation accuracy"),
        ],
    ),
    Plot(
        "loss",
        "Loss",
        "loss",
        [
            Curve("loss", "train", {"marker": "", "linestyle": "-"}, "training", by_epoch="train_loss"),
            Curve("val_loss", "epochs", {"linestyle": "--"}, "validation"),
        ],
    ),
    Plot("learning-rate", "Learning rate", "learning rate", [Curve("lr", "train", {"marker": ""})]),
    Plot("throughput", "Speed", "images/s", [Curve("images_per_s", "train", {"marker": ""}, by_epoch="images_per_s")]),
    Plot(
        "kfac",
        "K-FAC",
        "cosine of gradients",
        [
            Curve("cosine", "kfac", {"marker": "", "linestyle": "-"}, "median of the layers"),
            Curve("lowest_cosine", "kfac", {"marker": "", "linestyle": "--"}, "lowest"),
        ],
    ),
    Plot("time", "Where the time went"),
    Plot("ranks", "Where each rank's time went"),
)


def curve_points(run: Run, curve: Curve) -> list[Point]:
    """Return at most MAX_POINTS points of a curve, evenly chosen; lines without a number are left out."""
    points = _points(run, getattr(run, curve.lines), curve.key)
    if curve.by_epoch:  # a short run has few lines about its steps, or none
        points = max(points, _points(run, run.epochs, curve.by_epoch), key=len)
    return points[:: len(points) // MAX_POINTS + 1]


def _points(run: Run, lines: list[Line], key: str) -> list[Point]:
    steps_per_epoch, points = _steps_per_epoch(run), []
    for line in lines:
        step, elapsed_s, value = (number(line.get(name)) for name in ("step", "elapsed_s", key))
        if not any(map(math.isnan, (step, elapsed_s, value))):
            points.append(Point(step / steps_per_epoch, elapsed_s, value))
    return points


def _steps_per_epoch(run: Run) -> float:
    """Return what the first epoch's line says, or the header where there is none yet; NaN where unknown."""
    if run.epochs:
        steps, epochs = number(run.epochs[0].get("step")), number(run.epochs[0].get("epoch"))
    else:
        steps, epochs = number(run.header.get("train_samples")), number(run.header.get("global_batch_size"))
    return steps / epochs if steps and epochs else math.nan
