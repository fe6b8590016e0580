"""A run's metrics.jsonl: its name, its format, and what it says about the run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from datapipe.errors import DatapipeError, WrongPathError
from datapipe.foreign import read_regular

NAME = "metrics.jsonl"
FORMAT = 1
FAILED_HOSTS = "failed-hosts"  # file beside it: the hosts of the ranks for which the run has ended
# The parts of a run's time: those before its first step, those of a step, then the rest.
START_SECTIONS = ("staging", "start", "compile")
STEP_SECTIONS = ("wait", "forward_backward", "optimizer")
SECTIONS = (*START_SECTIONS, *STEP_SECTIONS, "evaluation", "checkpoint", "other")
BESIDE_TRAINING = (*START_SECTIONS, "evaluation", "checkpoint")  # not in the time that images/s refers to
# Of a line about K-FAC: a resumed run counts from 0 again.
_COUNTED_BY_PROCESS = ("factor_updates", "solution_updates", "clipped", "clip_steps")
DATA_BOUND_SHARE = 0.1  # of wait_share: below a tenth, a faster loader would gain little

Line = dict[str, Any]


def wait_share(time_s: Mapping[str, float]) -> float:
    """Return the fraction of the steps' time for which they waited for batches, from 0 to 1."""
    step_s = sum(time_s[section] for section in STEP_SECTIONS)
    return time_s["wait"] / step_s if step_s else 0.0


@dataclass
class Run:
    """What a run's metrics.jsonl says, without the lines that a resumed run wrote again."""

    header: Line
    resumes: list[Line] = field(default_factory=list)
    roll_backs: list[Line] = field(default_factory=list)
    skips: list[Line] = field(default_factory=list)
    train: list[Line] = field(default_factory=list)
    epochs: list[Line] = field(default_factory=list)
    kfac: list[Line] = field(default_factory=list)  # with the median "cosine" of the layers, and the lowest
    end: Line | None = None
    written_at: float = math.nan  # when the last line was, in seconds since 1970
    label: str = ""  # tells it from the report's other runs

    def time_s(self) -> dict[str, float]:
        """Return the seconds spent in each of SECTIONS."""
        return seconds_of([self.end] if self.end else self.epochs)

    def ranks(self) -> list[Line]:
        """Return what the end line says of each rank; nothing before the end, and of runs of earlier versions."""
        ranks = (self.end or {}).get("ranks")
        return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []

    def figures(self) -> dict[str, float]:
        """Return the figures of the end line, or what the epochs so far amount to; NaN where unknown."""
        target = self._target()
        figures = self.end or self._figures_so_far(target)
        names = ("accuracy", "best_accuracy", "time_to_target_s", "images_per_s", "wait_share")
        return {"target": target} | {name: number(figures.get(name)) for name in names}

    def _target(self) -> float:
        """Return the last one: a run that is resumed may have another."""
        lines = [recipe_section(self.header, "train"), *self.resumes, self.end or {}]
        targets = [line["target_accuracy"] for line in lines if "target_accuracy" in line]
        return number(targets[-1]) if targets else math.nan

    def _figures_so_far(self, target: float) -> Line:
        accuracies = [(number(line.get("val_accuracy")), line.get("elapsed_s")) for line in self.epochs]
        accuracies = [(accuracy, elapsed_s) for accuracy, elapsed_s in accuracies if accuracy >= 0]
        rates = [number(line.get("images_per_s")) for line in self.epochs or self.train]
        rates = [rate for rate in rates if rate > 0]
        time_s = self.time_s()
        return {
            "accuracy": accuracies[-1][0] if accuracies else None,
            "best_accuracy": max((accuracy for accuracy, _ in accuracies), default=None),
            "time_to_target_s": next((elapsed_s for accuracy, elapsed_s in accuracies if accuracy >= target), None),
            "images_per_s": harmonic_mean(rates) if rates else None,  # as epochs have equally many images
            "wait_share": wait_share(time_s) if any(time_s[section] for section in STEP_SECTIONS) else None,
        }

    def notes(self) -> list[str]:
        """Return what a reader should know before trusting the figures."""
        notes = []
        if self.end is None:
            notes.append("No end line: the run is still going, or was killed. Figures are so far.")
        if not self.epochs:
            notes.append("No epoch has finished.")
        for line in self.resumes:
            note = f"Resumed at step {line.get('step')}, world size {line.get('world_size')}"
            if "waited_s" in line:
                repeated = number(line.get("repeated_steps"), 0.0)
                note += f", {number(line['waited_s']):,.0f} s after it stopped; {repeated:,.0f} steps were done twice"
            notes.append(f"{note}.")
        if len(self.resumes) > 1:
            waited, repeated = (sum(number(line.get(name), 0.0) for line in self.resumes)
                                for name in ("waited_s", "repeated_steps"))  # fmt: skip
            total = f"{waited:,.0f} s passed in between, and {repeated:,.0f} steps were done twice"
            notes.append(f"It was resumed {len(self.resumes)} times: {total}.")
        for line in self.roll_backs:
            note = f"Rolled back from step {line.get('from_step')} to {line.get('step')}, as the loss had diverged"
            notes.append(
                f"{note}; the learning rate was {number(line.get('lr_factor')):.4g} of the schedule's after it."
            )
        if self.skips:
            steps = ", ".join(str(line.get("step")) for line in self.skips)
            notes.append(f"Steps that were skipped, as the loss had diverged: {steps}.")
        skipped = {line.get("step") for line in self.skips}
        diverged = [line for line in self.train if math.isnan(number(line.get("loss"))) and line["step"] not in skipped]
        if diverged:
            notes.append(f"The training loss was no longer finite at step {diverged[0].get('step')}.")
        return notes


def seconds_of(lines: list[Line]) -> dict[str, float]:
    """Return the seconds in each of SECTIONS that the "time_s" of some lines have together."""
    times = [line.get("time_s") or {} for line in lines]
    return {section: sum(number(time_s.get(section), 0.0) for time_s in times) for section in SECTIONS}


def read_run(folder: Path) -> Run:
    """Read a run's metrics.jsonl.

    Args:
        folder: Folder of the run.

    Raises:
        DatapipeError: There is no such file, or none that this version can read.
    """
    path = folder / NAME
    if not path.is_file():
        inside = next((each.parent for each in sorted(folder.glob(f"*/{NAME}"))), None)
        hint = f"name its runs, such as {inside}" if inside else "is this the folder of a training run?"
        raise WrongPathError(f"no such file: {hint}", path=path)
    lines = read_lines(path)
    if not lines or lines[0]["event"] != "run":
        raise DatapipeError("does not begin with a whole line about a run: killed at its start?", path=path)
    header = lines[0]
    if not isinstance(header.get("recipe") or {}, dict):
        raise DatapipeError("its first line holds no recipe", path=path)
    if (version := header.get("format")) != FORMAT:
        raise DatapipeError(f"format {version!r}: this version reads format {FORMAT} only; upgrade it", path=path)
    return _collect(header, lines)


def read_lines(path: Path) -> list[Line]:
    """Return the whole lines of a metrics.jsonl. Raises OSError."""
    return [*_lines(read_regular(path).decode(errors="replace"))]


def _lines(text: str) -> Iterator[Line]:
    """Yield the objects of metrics.jsonl. Where one was cut short, a resumed run's first follows in the same line."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r'\{"event"', text):
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(text, match.start())[0]


def _collect(header: Line, lines: list[Line]) -> Run:
    """Sort lines by their event; those after a resumed run's checkpoint count only as it wrote them again."""
    run = Run(header, written_at=number(lines[-1].get("written_at")))
    before = dict.fromkeys(_COUNTED_BY_PROCESS, 0)  # by the processes before the last resume
    for line in lines:
        match line["event"]:
            case "train":
                run.train.append(line)
            case "epoch":
                # A run that is resumed near an epoch's end reports the epoch again.
                run.epochs = [other for other in run.epochs if other.get("epoch") != line.get("epoch")] + [line]
            case "kfac":
                run.kfac.append(_with_cosines(line) | {key: line[key] + before[key] for key in before if key in line})
            case "end":
                run.end = line
            case "resume" | "roll_back" as event:
                (run.resumes if event == "resume" else run.roll_backs).append(line)
                step = number(line.get("step"))
                for known in (run.train, run.epochs, run.skips, run.kfac):
                    known[:] = [line for line in known if number(line.get("step")) <= step]
                run.end = None
                if event == "resume":
                    before = {key: run.kfac[-1].get(key, 0) if run.kfac else 0 for key in before}
            case "skip":
                run.skips.append(line)
    return run


def _with_cosines(line: Line) -> Line:
    """Add the median and the lowest cosine of a line about K-FAC, without layers that had no gradient."""
    cosines = line.get("cosines")
    values = [*map(number, cosines.values())] if isinstance(cosines, dict) else []
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return line | {"cosine": median(known), "lowest_cosine": min(known)}


def number(value: object, default: float = math.nan) -> float:
    """Return a number from JSON as a float; `default` for anything else, and where it would overflow."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else default


def recipe_section(header: Line, name: str) -> dict[str, Any]:
    """Return a section of the recipe in a run's first line; empty where there is none."""
    recipe = header.get("recipe") or {}
    return recipe[name] if isinstance(recipe.get(name), dict) else {}


def finite(value: Any) -> Any:
    """Return a value, or values in a dict or a list, with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value
