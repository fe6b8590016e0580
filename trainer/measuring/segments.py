"""How fast each number of ranks was, whole runs apart from segments of those that were resumed on another. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..reporting.runlog import Run, number, recipe_section
from .runs import Outcome
from .statistics import Sample, describe


@dataclass(frozen=True)
class Segment:
    """A part of a run in which the number of ranks was the same.

    Attributes:
        ranks: Number of ranks.
        steps: Number of the step after which it began, and that of the last step in it.
        images_per_s: Images per second over all of its steps; NaN if it is too short for a line of metrics.
    """

    ranks: int
    steps: tuple[int, int]
    images_per_s: float


@dataclass(frozen=True)
class Row:
    """A line of the table: all whole runs on a number of ranks, or a segment of a run that was resumed on others.

    Attributes:
        ranks: Number of ranks.
        segment: Name of the run and the first and last step of the segment; "" for whole runs.
        num_runs: Number of runs that were begun.
        images_per_s: Images per second over the runs that have finished, and their spread.
        note: Remarks that a reader should know.
        speed_up: Speed-up of images/s, against the ideal of a single rank.
        efficiency: Speed-up in parts of the ideal one.
        nodes: Number of nodes; None if that is not known.
        accuracy: Mean of the last accuracies.
        time_to_target_s: Mean time in seconds of those that reached the target.
    """

    ranks: int
    segment: str
    num_runs: int
    images_per_s: Sample
    note: str
    speed_up: float = math.nan
    efficiency: float = math.nan
    nodes: int | None = None
    accuracy: float = math.nan
    time_to_target_s: float = math.nan

    @property
    def images_per_s_per_rank(self) -> float:
        """Images/s of each rank."""
        return self.images_per_s.mean / self.ranks


def split_run(run: Run) -> list[Segment]:
    """Return the segments of a run; a single one, with the rate of its end line, unless it changed its ranks."""
    begins = [(0, int(number(run.header.get("world_size"), 1)))]
    for line in run.resumes:
        step, ranks = int(number(line.get("step"), 0)), int(number(line.get("world_size"), 1))
        if ranks != begins[-1][1]:
            begins.append((step, ranks))
    last = max((int(number(line.get("step"), 0)) for line in run.train + run.epochs), default=0)
    if len(begins) == 1:
        return [Segment(begins[0][1], (0, last), run.figures()["images_per_s"])]
    ends = [step for step, _ in begins[1:]] + [last]
    return [Segment(ranks, (step, end), _rate(run, step, end)) for (step, ranks), end in zip(begins, ends, strict=True)]


def _rate(run: Run, first: int, last: int) -> float:
    """Return the images/s of the epochs within some steps; of the lines about steps, where no epoch is whole.

    Epochs are rated as runs are, with all that is neither evaluation nor checkpoint.
    """
    epochs = [(number(line.get("step")) * (1 - 1 / number(line.get("epoch"))), line) for line in run.epochs]
    begins = [first, *(number(line.get("step")) for line in run.train if number(line.get("step")) > first)]
    steps = zip(begins, [line for line in run.train if number(line.get("step")) > first], strict=False)
    for lines in (epochs, list(steps)):
        parts = [
            (number(line.get("step")) - begin, number(line.get("images_per_s")))
            for begin, line in lines
            if first <= begin and number(line.get("step")) <= last and number(line.get("images_per_s")) > 0
        ]
        if parts:
            return sum(length for length, _ in parts) / sum(length / rate for length, rate in parts)
    return math.nan


def tabulate(scales: Mapping[int, Sequence[Outcome]]) -> list[Row]:
    """Return a row for each number of ranks, and one for each segment of a run that was resumed on another number.

    Args:
        scales: The runs that were begun on each number of ranks; none where all failed before.

    Returns:
        The rows by number of ranks, each followed by its segments. The ideal is that of the fewest ranks for which
        there is a rate, as many times as fast as there are ranks.
    """
    drafts = []
    headers = [outcome.header for outcomes in scales.values() for outcome in outcomes if outcome.run]
    is_weak = len({header.get("global_batch_size") for header in headers}) > 1
    for ranks, outcomes in sorted(scales.items()):
        whole = [outcome for outcome in outcomes if not _has_changed(outcome, ranks)]
        changed = [outcome for outcome in outcomes if outcome not in whole]
        row = _row(ranks, whole, changed)
        drafts.append(replace(row, note="; ".join(filter(None, [_batch(outcomes), row.note]))) if is_weak else row)
        for outcome in changed:
            for part in split_run(outcome.run) if outcome.run else ():
                label = f"{outcome.name}, steps {part.steps[0]} to {part.steps[1]}"
                rates = [part.images_per_s] if part.images_per_s > 0 else []
                note = f"part of a run begun on {outcome.header.get('world_size')}, in ranks-{ranks}"
                drafts.append(Row(part.ranks, label, 1, describe(rates), note))
    rated = [row for row in drafts if not row.segment and row.images_per_s.num]
    if not rated:
        return drafts
    shares = [row.images_per_s_per_rank / rated[0].images_per_s_per_rank for row in drafts]
    return [
        replace(row, speed_up=share * row.ranks, efficiency=share) for row, share in zip(drafts, shares, strict=True)
    ]


def _batch(outcomes: Sequence[Outcome]) -> str:
    """Return the batch and the learning rate of a number of ranks, in words, for a table in which they differ."""
    header = next((outcome.header for outcome in outcomes if outcome.run), None)
    if header is None:
        return ""
    batch_size, ranks = number(header.get("global_batch_size")), number(header.get("world_size"))
    rule = str(recipe_section(header, "optimizer").get("lr_scaling", "none"))
    scaled = "not scaled" if rule == "none" else f"scaled: {rule}"
    rate = f"learning rate {number(header.get('peak_lr')):.4g} ({scaled})"
    return f"batch {batch_size:,.0f}, {batch_size / ranks:,.0f} per rank, {rate}"


def _has_changed(outcome: Outcome, ranks: int) -> bool:
    return outcome.run is not None and {part.ranks for part in split_run(outcome.run)} != {ranks}


def _row(ranks: int, whole: Sequence[Outcome], changed: Sequence[Outcome]) -> Row:
    finished = [outcome.figures() for outcome in whole if outcome.is_finished]
    means = {
        key: describe([figures[key] for figures in finished if not math.isnan(figures[key])])
        for key in ("images_per_s", "accuracy", "time_to_target_s")
    }
    attempts = [line for outcome in whole for line in outcome.attempts]
    nodes = max((line["nodes"] for line in attempts if "nodes" in line), default=None)
    cores = min((line["cores"] for line in attempts if "cores" in line), default=None)
    notes = []
    if not whole:
        notes.append("no whole run" if changed else "failed before it began")
    elif all(outcome.status.startswith("failed") for outcome in whole):
        notes.append("failed")
    if len(finished) < len(whole):
        notes.append(f"{len(finished)} of {len(whole)} finished")
    codes = sorted({str(line["exit_code"]) for line in attempts if line.get("exit_code")})
    if codes and len(finished) < len(whole):
        notes.append(f"exit code {', '.join(codes)}")
    if len(finished) == 1:
        notes.append("one run: its spread is not known")
    if changed:
        notes.append(f"without {len(changed)} resumed on other numbers")
    if cores is not None and ranks > cores * (nodes or 1):
        notes.append(f"more ranks than cores, {cores * (nodes or 1)}")
    row = Row(ranks, "", len(whole), means["images_per_s"], "; ".join(notes), nodes=nodes)
    return replace(row, accuracy=means["accuracy"].mean, time_to_target_s=means["time_to_target_s"].mean)
