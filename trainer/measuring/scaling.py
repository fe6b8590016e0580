"""How training scales over ranks, from the repeats that tools/scaling.sh made on each number of them.

    python -m trainer.measuring.scaling FOLDER

FOLDER holds the repeats of each number of ranks in ranks-N. Writes scaling.txt, .csv, .json, .png and .pdf beside them.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datapipe import console
from datapipe.errors import DatapipeError
from datapipe.fsio import atomic_write

from ..reporting.formatting import format_figure
from .runs import Outcome, check_comparable, is_seed, read_group
from .scaling_plot import write_plot
from .segments import Row, tabulate
from .tables import format_table, plain, to_json


def read_scales(folder: Path) -> dict[int, list[Outcome]]:
    """Read the repeats on each number of ranks, from the folders ranks-N.

    Raises:
        DatapipeError: There is none, or one cannot be read.
        SettingError: Their targets or data sets differ.
    """
    scales: dict[int, list[Outcome]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch("ranks-([1-9][0-9]{0,8})", path.name)
        if match and path.is_dir():
            has_runs = any(map(is_seed, path.iterdir()))
            scales[int(match[1])] = read_group(path).outcomes if has_runs else []
    if not scales:
        raise DatapipeError("holds no folder ranks-N with runs", path=folder)
    scales = dict(sorted(scales.items()))
    check_comparable({f"ranks-{ranks}": outcomes for ranks, outcomes in scales.items()})
    return scales


COLUMNS = {
    "images_per_s": "{:,.0f}",
    "std": "{:,.0f}",
    "speed_up": "{:.2f}",
    "efficiency": "{:.0%}",
    "images_per_s_per_rank": "{:,.0f}",
    "accuracy": "{:.2%}",
    "time_to_target_s": "{:,.1f}",
}
HEADS = ["images/s", "std", "speed-up", "efficiency", "per rank", "accuracy", "to target, s"]


def _figures(row: Row) -> dict[str, float]:
    sample = row.images_per_s
    known = {"images_per_s": sample.mean, "std": sample.std, "images_per_s_per_rank": row.images_per_s_per_rank}
    return {key: known[key] if key in known else getattr(row, key) for key in COLUMNS}


def format_rows(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    cells = []
    for row in rows:
        figures = _figures(row)
        nodes = "–" if row.nodes is None else str(row.nodes)
        texts = [format_figure(figures[key], form) for key, form in COLUMNS.items()]
        ranks = f"{row.ranks}" if not row.segment else f"  {row.ranks}: {row.segment}"
        cells.append([ranks, nodes, str(row.num_runs), *texts, row.note])
    lines = format_table(["ranks", "nodes", "runs", *HEADS, "note"], cells)
    return f"{lines}\n"


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["ranks", "segment", "nodes", "runs", *COLUMNS, "note"])
    for row in rows:
        figures = plain(_figures(row)).values()
        writer.writerow([row.ranks, row.segment, row.nodes, row.num_runs, *figures, row.note])
    return text.getvalue()


def _values(rows: Sequence[Row]) -> dict[str, Any]:
    return {"rows": [plain(asdict(row)) | {"images_per_s": plain(asdict(row.images_per_s))} for row in rows]}


def write_scaling(folder: Path) -> tuple[str, int]:
    """Write the table and the plot of a folder; return the table, and the exit code: 1 where a run has not finished."""
    scales = read_scales(folder)
    rows = tabulate(scales)
    table = format_rows(rows)
    for suffix, text in ((".txt", table), (".csv", _csv(rows)), (".json", to_json(_values(rows)) + "\n")):
        with atomic_write(folder / f"scaling{suffix}") as file:
            file.write(text.encode())
    write_plot(rows, scales, folder)
    is_whole = all(outcomes and all(outcome.is_finished for outcome in outcomes) for outcomes in scales.values())
    return table, int(not is_whole)


def main() -> int:
    """Run the command line; return its exit code."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs every glyph of the PDF
    parser = argparse.ArgumentParser(prog="python -m trainer.measuring.scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what tools/scaling.sh wrote to")

    def command() -> None:
        table, code = write_scaling(parser.parse_args().folder)
        print(table, end="", flush=True)
        raise SystemExit(code)

    return console.run(command)


if __name__ == "__main__":
    sys.exit(main())
