"""The report on one run, or on several side by side: one HTML page, and its plots as PDF and PNG.

The page is laid out in report.html.jinja and report.css.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from datapipe.errors import SettingError
from datapipe.fsio import atomic_write, make_folder, remove_old_partials

from .changes import suggest_changes
from .formatting import SPACE, format_duration, format_figure, format_value
from .mlperf import write_log
from .plots import PARTS, write_plots
from .runlog import DATA_BOUND_SHARE, NAME, STEP_SECTIONS, Line, Run, number, read_run, seconds_of
from .svg import DARK, LIGHT

# Columns of the comparison that say what was run, which one run's details show anyway.
_IDENTITY = {
    "recipe name": "recipe_name",
    "device": "device",
    "world size": "world_size",
    "global batch size": "global_batch_size",
}
_RESULTS = "accuracy", "best accuracy", "target", "time to target", "images/s", "relative", "waiting for data"
_LONGEST_LABEL = 40  # characters of the end of a path
_MEMORY = "memory_bytes", "gpu_memory_bytes"  # of a rank, at most
_NOT_SHOWN = "event", "format", "written_at", "elapsed_s", "mlperf"  # of the run's first line


@dataclass(frozen=True)
class Details:
    """What was run, on what, with which settings, and where the time went.

    Attributes:
        label: Label of the run.
        changes: Changes that the page suggests, as sentences.
        tables: Tables of names and values, by title.
        ranks: Row for each rank, by column; of a run of earlier versions, or before its end, none.
    """

    label: str
    changes: list[str]
    tables: dict[str, dict[str, str]]
    ranks: list[dict[str, str]]


def write_report(runs: list[Path], out: Path, refresh_s: int | None = None) -> Path:
    """Write report.html, the same as report.pdf, and a PNG and a PDF of each plot; of a single run its mlperf.log.

    Args:
        runs: Run folders, compared in this order.
        out: Folder to write to; made where it does not exist.
        refresh_s: Time between the reloads of the page by a browser, in seconds; None: no reloads.

    Returns:
        The path of report.html.

    Raises:
        SettingError: No run is given, or `out` is a file, or of several runs the folder of one.
        DatapipeError: A folder has no readable metrics.jsonl.
    """
    if not runs:
        raise SettingError("runs: [], but a report needs at least one run folder")
    loaded = [read_run(folder) for folder in runs]
    several = len(runs) > 1
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out {out}: is a file; allowed: a folder, or a new name")
    if several and (out / NAME).exists():
        raise SettingError(
            f"--out {out}: is the folder of a run; a report on {len(runs)} runs needs a folder of its own"
        )
    for run, label in zip(loaded, _labels(loaded, runs), strict=True):
        run.label = label
    make_folder(out)
    details = [_details(run) for run in loaded]
    rows = _comparison(loaded) if several else [_figures_in_words(loaded[0])]
    texts = {run.label: _for_pdf(run, row) for run, row in zip(details, rows, strict=True)}
    remove_old_partials(out)
    drawings = write_plots(loaded, texts, out)
    page = _template().render(
        refresh_s=refresh_s,
        light=LIGHT,
        dark=DARK,
        labels=[run.label for run in loaded],
        table=rows if several else None,
        figures=None if several else rows[0],
        verdict=None if several else _verdict(loaded[0]),
        notes=_notes(loaded),
        plots=drawings,
        details=details,
    )
    with atomic_write(out / "report.html", alone=False) as file:  # someone may be watching the run
        file.write(page.encode())
    if not several:
        write_log(loaded[0], out)
    return out / "report.html"


def _notes(runs: list[Run]) -> list[str]:
    """Return what a reader should know before trusting the figures."""
    if len(runs) == 1:
        return runs[0].notes()
    notes = [f"{run.label}: {note}" for run in runs for note in run.notes()]
    data_sets = [run.header.get("data_sets") for run in runs]
    if any(known != data_sets[0] for known in data_sets):
        notes.insert(0, "Not all runs are known to be of the same data set, so that accuracies may not be comparable.")
    return notes


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _labels(runs: list[Run], folders: list[Path]) -> list[str]:
    """Name each run with as much of the end of its path as tells it from the others."""
    paths = [folder.resolve().parts for folder in folders]
    endings = (["/".join(path[-length:]) for path in paths] for length in range(1, max(map(len, paths)) + 1))
    numbered = [f"{path[-1]} ({i})" for i, path in enumerate(paths, 1)]  # for a folder that is given twice
    names = next((names for names in endings if len(set(names)) == len(names)), numbered)
    sizes = [run.header.get("world_size") for run in runs]
    labels = []
    for name, size in zip(names, sizes, strict=True):
        label = name if len(name) <= _LONGEST_LABEL else f"…{name[1 - _LONGEST_LABEL :]}"
        if sizes.count(size) < len(sizes):
            label += f" · {size} rank" if size == 1 else f" · {size} ranks"
        # A matplotlib legend leaves out labels that begin with an underscore.
        labels.append(re.sub("^_", f"{SPACE}_", format_value(label)))
    return labels


def _figures_in_words(run: Run) -> dict[str, str]:
    """Return a run's figures as the page shows them, by name; the memory, where it is known, is that of a rank."""
    figures = run.figures()
    end = run.end or {"status": "in progress"}
    most = {key: max((number(rank.get(key), 0.0) for rank in run.ranks()), default=0.0) for key in _MEMORY}
    last = run.epochs[-1] if run.epochs else {}
    return {
        "accuracy": format_figure(figures["accuracy"], "{:.2%}"),
        "training accuracy": format_figure(number(last.get("train_accuracy")), "{:.2%}"),
        "training loss": format_figure(number(last.get("train_loss")), "{:.4f}"),
        "target": format_figure(figures["target"], "{:.2%}"),
        "time to target": format_duration(figures["time_to_target_s"]),
        "images/s": format_figure(figures["images_per_s"], "{:,.0f}"),
        "waiting for data": format_figure(figures["wait_share"], "{:.1%}"),
        **{name: str(value) for name, value in _with_units({key: n for key, n in most.items() if n}).items()},
        "status": format_value(end.get("status")).replace("_", " "),
    }


def _comparison(runs: list[Run]) -> list[dict[str, str]]:
    """Return a row for each run, by column."""
    first = runs[0].figures()["images_per_s"] or math.nan
    rows = []
    for run in runs:
        figures, words = run.figures(), _figures_in_words(run)
        words["best accuracy"] = format_figure(figures["best_accuracy"], "{:.2%}")
        words["relative"] = format_figure(figures["images_per_s"] / first, "{:.2f}×")
        identity = {column: format_value(run.header.get(key)) for column, key in _IDENTITY.items()}
        rows.append({"run": run.label, **identity, **{column: words[column] for column in (*_RESULTS, "status")}})
    return rows


def _verdict(run: Run) -> str:
    """Say whether its data limit the run; what else does, its metrics do not tell."""
    share = run.figures()["wait_share"]
    if math.isnan(share):
        return "Too early to tell what limits it."
    waits = f"data-bound: {format_figure(share, '{:.1%}')} of the steps' time was spent waiting for batches"
    if share >= DATA_BOUND_SHARE:
        return f"{waits}."
    return f"not {waits}; trainer profile tells what else bounds it."


def _details(run: Run) -> Details:
    facts = {key: value for key, value in run.header.items() if key not in _NOT_SHOWN}
    recipe = dict(facts.pop("recipe", None) or {})
    versions, hardware = (facts.pop(name, None) or {} for name in ("versions", "hardware"))
    settings = {key: recipe.pop(key) for key in list(recipe) if not isinstance(recipe[key], dict)}
    time = {part: format_duration(seconds) for part, seconds in run.time_s().items()}
    tables = {
        "run": facts | settings,
        "hardware": _with_units(hardware),
        "versions": versions,
        "time": time,
        "what K-FAC did": _kfac_in_words(run),
        **recipe,
    }
    return Details(
        run.label,
        [format_value(line) for line in suggest_changes(run)],
        {
            format_value(title): {format_value(key): format_value(value) for key, value in table.items()}
            for title, table in tables.items()
            if table
        },
        [_rank_in_words(rank) for rank in run.ranks()],
    )


def _for_pdf(run: Details, figures: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return what report.pdf says of a run, by title: its results, what to change, and the tables of the page."""
    changes = {f"{i}.": line for i, line in enumerate(run.changes, 1)}
    return {"results": figures} | ({"what to change": changes} if changes else {}) | run.tables


def _with_units(facts: Mapping[str, object]) -> dict[str, object]:
    """Return facts by name, those in bytes as GiB."""
    words = {}
    for key, value in facts.items():
        if key.endswith("_bytes"):
            key = key.removesuffix("_bytes").replace("_", " ")
            value = format_figure(number(value) / 2**30, f"{{:,.1f}}{SPACE}GiB")
        words[key] = value
    return words


def _rank_in_words(rank: Line) -> dict[str, str]:
    """Return where a rank was, what its steps' time went into, and the most memory that it had, by column."""
    seconds = {section: format_duration(s) for section, s in seconds_of([rank]).items() if section in STEP_SECTIONS}
    seconds["wait"] += f" ({format_figure(number(rank.get('wait_share')), '{:.1%}')})"
    return {
        "rank": format_value(rank.get("rank")),
        "host": format_value(rank.get("host")),
        **{PARTS[section][1]: text for section, text in seconds.items()},
        **{name: str(value) for name, value in _with_units(rank).items() if name.endswith("memory")},
    }


def _kfac_in_words(run: Run) -> dict[str, object]:
    """Return what the last line about K-FAC says: updates of layers' factors and solutions, and what went wrong."""
    if not run.kfac:
        return {}
    names = ("factor_updates", "solution_updates", "skipped", "fallbacks", "damping")
    last = run.kfac[-1]
    words = {name.replace("_", " "): last.get(name) for name in names}
    if steps := number(last.get("clip_steps"), 0.0):
        share = format_figure(number(last.get("clipped")) / steps, "{:.0%}")
        words["steps bound by the clip"] = f"{share} of {steps:,.0f}"
    return words | {"median cosine": format_figure(number(last["cosine"]), "{:.2f}")}
