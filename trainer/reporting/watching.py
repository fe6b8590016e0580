"""A report that is written again and again until its runs have ended."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from .page import write_report
from .runlog import NAME, read_run

logger = logging.getLogger(__name__)
_LOOK_S = 2.0
_REFRESH_S = 5


def watch_report(runs: list[Path], out: Path) -> Path:
    """Write the report of runs whenever their metrics have changed, until all have ended.

    One that was only interrupted may continue, as by a job that is queued again.

    Args:
        runs: Run folders, which need not be there yet.
        out: Folder to write to.

    Returns:
        The path of report.html.

    Raises:
        SettingError: No run is given, or `out` is a file.
        DatapipeError: A folder has no readable metrics.jsonl.
    """
    seen: list[int] = []
    while True:
        sizes = [_size(run) for run in runs]
        missing = [run for run, size in zip(runs, sizes, strict=True) if not size]
        if sizes != seen and missing:
            logger.info("waiting for %s", ", ".join(str(run / NAME) for run in missing))
        elif sizes != seen:
            have_ended = all(_has_ended(run) for run in runs)
            path = write_report(runs, out, None if have_ended else _REFRESH_S)
            if not seen or have_ended:
                logger.info("%s", path)
            if have_ended:
                return path
        seen = sizes
        time.sleep(_LOOK_S)


def _size(run: Path) -> int:
    path = run / NAME
    return path.stat().st_size if path.exists() else 0


def _has_ended(run: Path) -> bool:
    end = read_run(run).end
    return end is not None and end.get("status") != "interrupted"
