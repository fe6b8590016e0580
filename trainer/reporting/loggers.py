"""Where the lines of metrics.jsonl go besides: to CSV, to TensorBoard, or to what another package adds.

A package adds a logger by an entry point of the group `trainer.loggers`: what is called with the run's folder and the
lines that a resumed run has already, and returns a Logger.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from datapipe.checks import did_you_mean
from datapipe.errors import DatapipeError, SettingError, how_to_install

from .runlog import Line

logger = logging.getLogger(__name__)
_GROUP = "trainer.loggers"
_COLUMNS: tuple[str, ...] = ("event", "step", "epoch", "elapsed_s", "loss", "lr", "images_per_s")
_COLUMNS += ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


class Logger(Protocol):
    """What is told each line of a run's metrics, on the first rank."""

    def write(self, line: Line) -> None:
        """Note a line: its "event" is run, resume, train, kfac, epoch, diverged, skip, roll_back or end."""

    def close(self) -> None:
        """End; the run has ended, or failed."""


LoggerFactory = Callable[[Path, Sequence[Line]], Logger]


class CsvLogger:
    """Writes RUN/metrics.csv: a row for each line about a step or an epoch."""

    def __init__(self, run: Path, lines: Sequence[Line]) -> None:
        self._file = open(run / "metrics.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115 - stays open
        self._rows = csv.DictWriter(self._file, _COLUMNS, extrasaction="ignore")
        self._rows.writeheader()
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        """Write a row, if the line is about a step or an epoch."""
        if line["event"] in ("train", "epoch"):
            self._rows.writerow(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes event files to RUN/tensorboard, by step; those of a resumed run take the place of what was cut off."""

    def __init__(self, run: Path, lines: Sequence[Line]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, last = run / "tensorboard", max((int(line.get("step", 0)) for line in lines), default=0)
        missing = () if folder.exists() else lines  # it was not asked for before
        self._writer = SummaryWriter(str(folder), purge_step=last + 1 if lines and not missing else None)
        for line in missing:
            self.write(line)

    def write(self, line: Line) -> None:
        """Write each number of a line about a step or an epoch."""
        if line["event"] in ("train", "epoch"):
            for name in _COLUMNS[3:]:
                if line.get(name) is not None:
                    self._writer.add_scalar(f"{line['event']}/{name}", line[name], line["step"])
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


_BUILT_IN: dict[str, LoggerFactory] = {"csv": CsvLogger, "tensorboard": TensorBoardLogger}
_FAILURES = (Exception, SystemExit)  # of a package that may be a program's: its exit is not to be the run's


def find_loggers(names: Sequence[str]) -> dict[str, LoggerFactory]:
    """Return what makes the loggers of these names.

    Raises SettingError where there is none of a name, or the package of one is not installed, or cannot be imported.
    """
    added = {point.name: point for point in entry_points(group=_GROUP)}
    factories: dict[str, LoggerFactory] = {}
    for name in names:
        if name in _BUILT_IN:
            if name == "tensorboard" and find_spec(name) is None:  # before there is a folder for the run
                raise SettingError(f"--log tensorboard: its package is not installed: {how_to_install(name)}")
            factories[name] = _BUILT_IN[name]
        elif name in added:
            try:
                factories[name] = added[name].load()
            except _FAILURES as error:
                what = f"{added[name].value} cannot be imported: {_in_a_line(error)}"
                raise SettingError(f"--log {name}: {what}") from error
        else:
            allowed = ", ".join(sorted({*_BUILT_IN, *added}))
            hint = did_you_mean(name, {*_BUILT_IN, *added})
            raise SettingError(
                f"--log {name}: is not known; allowed: {allowed}, or what a package adds as {_GROUP!r}{hint}"
            )
    return factories


class Loggers:
    """Several loggers as one. A run is not to end because of one: one that fails is told of, and then left out."""

    def __init__(self, factories: Mapping[str, LoggerFactory], run: Path, lines: Sequence[Line]) -> None:
        """Open them. Raises SettingError where one wants something that is not here, DatapipeError where one fails."""
        self._loggers: dict[str, Logger] = {}
        for name, factory in factories.items():
            try:
                self._loggers[name] = factory(run, lines)
            except (SettingError, OSError):
                raise
            except _FAILURES as error:
                raise DatapipeError(f"--log {name}: {_in_a_line(error)}") from error

    def write(self, line: Line) -> None:
        """Tell a line to all."""
        self._each(lambda target: target.write(line))

    def close(self) -> None:
        """Close all."""
        self._each(lambda target: target.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, target in [*self._loggers.items()]:
            try:
                call(target)
            except _FAILURES as error:
                del self._loggers[name]
                what = "has failed, and is told nothing more; the run continues"
                logger.error("--log %s %s: %s", name, what, _in_a_line(error))
                logger.debug("--log %s", name, exc_info=True)


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
