"""Folders of runs, and what each run has come to. Nothing that is there is left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datapipe.errors import SettingError, WrongPathError

from ..reporting.formatting import format_figure
from ..reporting.runlog import NAME as METRICS
from ..reporting.runlog import Run, number, read_run

ATTEMPTS = "attempts.jsonl"  # in a run's folder: a line for each process that `trainer repeat` has started there
_FINISHED = ("target_reached", "target_missed", "completed")
# What two runs must share for their figures to mean the same, as the header of a run calls it.
_SHARED = {
    "train_samples": "training images",
    "val_samples": "validation images",
    "num_classes": "classes",
    "data_sets": "data sets (by checksum)",
}
# What may differ between runs, and is told.
_CIRCUMSTANCES = ("device", "world_size", "versions", "commit")


@dataclass(frozen=True)
class Outcome:
    """What a run has come to.

    Attributes:
        name: Name of the run's folder.
        run: Content of its metrics.jsonl; None if that does not begin with a whole line.
        attempts: Lines of its attempts.jsonl, if `trainer repeat` has started it.
    """

    name: str
    run: Run | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> str:
        """How it ended; "not begun", or "unfinished" where it is still going or was killed."""
        if self.run is None:
            return "failed at its start" if self.attempts else "not begun"
        return str(self.run.end.get("status")) if self.run.end else "unfinished"

    @property
    def end(self) -> dict[str, Any]:
        """The line about its end; empty before it."""
        return (self.run.end if self.run else None) or {}

    @property
    def is_finished(self) -> bool:
        """Whether its figures are final."""
        return self.status in _FINISHED

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """The lines about its being resumed."""
        return self.run.resumes if self.run else []

    @property
    def header(self) -> dict[str, Any]:
        """The header of its metrics, and what only `trainer repeat` knows."""
        known = {key: line[key] for line in self.attempts for key in _SHARED if key in line}
        return known | (self.run.header if self.run else {})

    @property
    def settings(self) -> dict[str, Any]:
        """Its recipe, without what tells repeats apart."""
        return settings_alike(self.header.get("recipe") or {})

    def figures(self) -> dict[str, float]:
        """Return accuracy, best_accuracy, time_to_target_s, elapsed_s, images_per_s and epochs_to_target.

        They are so far, where it is not finished; NaN is what is unknown.
        """
        names = ("accuracy", "best_accuracy", "time_to_target_s", "images_per_s")
        if self.run is None:
            return dict.fromkeys((*names, "elapsed_s", "epochs_to_target"), math.nan)
        figures, target = self.run.figures(), self.run.figures()["target"]
        lines = [self.run.end] if self.run.end else self.run.epochs[-1:]
        reached = [line for line in self.run.epochs if number(line.get("val_accuracy")) >= target]
        return {name: figures[name] for name in names} | {
            "elapsed_s": number(lines[0].get("elapsed_s")) if lines else math.nan,
            "epochs_to_target": number(reached[0].get("epoch")) if reached else math.nan,
        }


@dataclass(frozen=True)
class RunGroup:
    """The runs of a folder: those of one recipe, or a single run. `name` is that of the folder."""

    name: str
    outcomes: list[Outcome]

    @property
    def begun(self) -> list[Outcome]:
        """Those of which there are metrics."""
        return [outcome for outcome in self.outcomes if outcome.run]

    def values(self, figure: str) -> list[float]:
        """Return a figure of all finished runs that have it."""
        values = [outcome.figures()[figure] for outcome in self.outcomes if outcome.is_finished]
        return [value for value in values if not math.isnan(value)]

    @property
    def has_target(self) -> bool:
        """Whether its recipe has a target accuracy."""
        return any(outcome.run and outcome.run.figures()["target"] > 0 for outcome in self.outcomes)


def settings_alike(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without what may differ between repeats: the seed, and what is only said of the recipe."""
    train = {key: value for key, value in (recipe.get("train") or {}).items() if key != "seed"}
    texts = "name", "source", "published"
    return {key: value for key, value in recipe.items() if key not in texts} | {"train": train}


def read_outcome(folder: Path) -> Outcome:
    """Read what the run in a folder has come to. Raises DatapipeError where its metrics cannot be read."""
    attempts = []
    if (folder / ATTEMPTS).is_file():
        for line in (folder / ATTEMPTS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # it was cut short on a full disk
                attempts.append(json.loads(line))
    is_begun = (folder / METRICS).is_file() and b"\n" in (folder / METRICS).read_bytes()
    return Outcome(folder.name, read_run(folder) if is_begun else None, attempts)


def read_group(folder: Path) -> RunGroup:
    """Read a run's folder, or a folder of such folders, as `trainer repeat` makes it.

    Raises:
        DatapipeError: There is no run in it, or one that cannot be read.
        SettingError: Its runs are not of one recipe.
    """
    name = folder.resolve().name
    if (folder / METRICS).exists():
        return RunGroup(name, [read_outcome(folder)])
    outcomes = read_outcomes(folder)
    if not outcomes:
        raise WrongPathError("holds no run, and no folder of runs", path=folder)
    begun = [outcome for outcome in outcomes if outcome.run]
    for outcome in begun:
        if outcome.settings != begun[0].settings:
            raise SettingError(f"{folder}: {begun[0].name} and {outcome.name} are not runs of the same recipe")
    check_comparable({name: begun})
    return RunGroup(name, outcomes)


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the runs in a folder, by name. Raises DatapipeError where the metrics of one cannot be read."""
    inner = sorted(folder.iterdir(), key=_natural) if folder.is_dir() else []
    return [read_outcome(path) for path in inner if (path / METRICS).exists() or is_seed(path)]


def is_seed(path: Path) -> bool:
    """Return whether a path is the folder of one of the runs of `trainer repeat`."""
    return path.is_dir() and re.fullmatch("seed-[0-9]+", path.name) is not None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key by which seed-10 comes after seed-9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split("([0-9]+)", path.name)]


def check_comparable(groups: Mapping[str, Sequence[Outcome]]) -> None:
    """Raise SettingError, unless all runs of named groups have the same target, data sets and validation images."""
    first: dict[str, tuple[str, object]] = {}
    for group, outcome in ((name, outcome) for name, outcomes in groups.items() for outcome in outcomes):
        if outcome.run is None:
            continue
        this = f"{group}, {outcome.name}"
        target = outcome.run.figures()["target"]
        facts: dict[str, object] = {"target": format_figure(target, "{:.4%}") if target > 0 else "none"}
        facts |= {words: outcome.header[key] for key, words in _SHARED.items() if outcome.header.get(key) is not None}
        for words, value in facts.items():
            name, known = first.setdefault(words, (this, value))
            if known != value:
                raise SettingError(f"({name}) and ({this}) cannot be compared: {words} {known} and {value}")


def differences(headers: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """List in words in which circumstances named runs differ: devices, ranks, versions, commits."""
    notes = []
    for key in _CIRCUMSTANCES:
        values: dict[str, list[str]] = {}
        for name, header in headers:
            values.setdefault(_in_words(header.get(key)), []).append(name)
        if len(values) > 1:
            parts = (f"{value} ({', '.join(names)})" for value, names in values.items())
            notes.append(f"not all alike in {key.replace('_', ' ')}: {'; '.join(parts)}")
    return notes


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
