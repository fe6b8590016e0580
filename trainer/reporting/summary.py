"""The summary of a finished run on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datapipe.console import printable

from .runlog import DATA_BOUND_SHARE, START_SECTIONS


def summary(
    end: dict[str, Any], target: float | None, report: Path | str | None, run: Path, published: str = ""
) -> str:
    """Return a few lines about how a run ended.

    Args:
        end: The "end" line of metrics.jsonl.
        target: The accuracy that ends the run, from 0 to 1; None: no target.
        report: The run's report, if it was written, or why it was not.
        run: Folder of the run.
        published: Result that the recipe's source reached.
    """
    accuracy = "not evaluated" if end["accuracy"] is None else f"{end['accuracy']:.2%}"
    if target is not None:
        verdicts = {"target_reached": "reached", "target_missed": "missed"}
        accuracy += f" (target {target:.2%} {verdicts.get(end['status'], 'not reached yet')})"
    rows = [("accuracy", accuracy)]
    if published:
        rows.append(("published", f"{published} (the recipe unchanged)"))
    if end["time_to_target_s"] is not None:
        rows.append(("time to target", f"{end['time_to_target_s']:.1f} s"))
    start = [f"{section} {end['time_s'][section]:.1f} s" for section in START_SECTIONS if end["time_s"][section]]
    rows += [
        ("training time", f"{end['elapsed_s']:.1f} s"),
        ("before the steps", ", ".join(start)),
        ("images/s", f"{end['images_per_s']:,.0f}"),
        ("waiting for data", f"{end['wait_share']:.1%} of the steps' time"),
    ]
    if report is not None:
        rows.append(("report", str(report)))
    lines = [f"{name:<17} {value}" for name, value in rows]
    if end["wait_share"] >= DATA_BOUND_SHARE:
        share = f"{end['wait_share']:.0%}"
        lines.append(
            f"data-bound: {share} of the steps' time was spent waiting; datapipe bench says which stage is slow"
        )
    if end["status"] == "interrupted":
        stopped_by = end["stopped_by"]
        reason = "since the time is nearly over" if stopped_by == "time" else f"by {stopped_by}"
        lines.append(f"trainer report {run} writes a report until here")
        lines.append(f"interrupted {reason}; a checkpoint is saved, and --resume continues {run}")
    return "\n".join(map(printable, lines))
