"""The page of a run of `run_steps`: goals, figures as bars and tables, and what failed, in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.drawing import Bar, Bars, Plot, draw
from trainer.reporting.svg import svg_for_page

Record = Mapping[str, Any]
Cells = Mapping[str, Callable[[Record], str]]

# Images/s of ResNet-50 in bfloat16 on one H100-class GPU, as published.
PUBLISHED = {"PyTorch's published figure": 2790, "MLPerf's best stack": 7155}
DALI_AHEAD = 1.3  # times as many images/s as the fastest training takes
KFAC_MAY_ADD = 0.10  # of SGD's step
STYLE = """
:root { --ink: #24292f; --muted: #59636e; --line: #d8dde3; --c0: #0072b2 }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 46rem; margin: 0 auto; padding: 0 1rem 3rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
.scroll { overflow-x: auto } svg { width: 100%; height: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top }
td { white-space: nowrap } th { color: var(--muted); font-weight: 500 }
th:first-child, td:first-child { text-align: left; min-width: 8rem; white-space: normal }
.texts td { text-align: left; white-space: normal; overflow-wrap: anywhere } .texts td:first-child { min-width: 6rem }
pre { font-size: .75rem; overflow-x: auto; background: #f4f6f8; padding: .6rem } .muted { color: var(--muted) }
"""


def _figure(key: str, form: str, scale: float = 1.0) -> Callable[[Record], str]:
    """Return what shows a figure, or the median of several with the least and the greatest."""

    def show(figures: Record) -> str:
        value = figures.get(key)
        if isinstance(value, Mapping):
            median, low, high = (format(scale * value[name], form) for name in ("median", "min", "max"))
            return f"{median} ({low}–{high})"
        return value if isinstance(value, str) else "–" if value is None else format(scale * value, form)

    return show


RATE = _figure("images_per_s", ",.0f")
COLUMNS: dict[str, Cells] = {  # of the table of a group of steps
    "tests": {name: _figure(name, ".0f") for name in ("passed", "failed", "skipped")},
    "ResNet-50": {
        "images/s": RATE,
        "of the peak": _figure("share_of_peak", ".0%"),
        "waiting": _figure("wait_share", ".0%"),
        "GPU GiB": _figure("gpu_memory_gib", ".1f"),
        "compiling, s": _figure("compile_s", ".0f"),
    },
    "K-FAC's step": {
        "ms": _figure("ms", ".1f"),
        "SGD, ms": _figure("sgd_ms", ".1f"),
        "added": _figure("added", "+.1%"),
        "host, ms": _figure("host_ms", ".1f"),
        "SGD, host, ms": _figure("sgd_host_ms", ".1f"),
        "by formula, ms": _figure("formula_ms", ".1f"),
        "worst ÷ median": _figure("worst_over_median", ".2f"),
        "host waits": _figure("waits", ""),
        "in refreshes": _figure("waits_in_refreshes", ""),
    },
    "3×3 factor": {"products, ms": _figure("products_ms", ".2f"), "convolution, ms": _figure("convolution_ms", ".2f")},
    "loader": {"images/s": RATE, "images/CPU-s": _figure("images_per_cpu_s", ",.0f")},
    "accuracy": {
        "images": _figure("data", ""),
        "to the target, s": _figure("time_to_target_s", ".1f"),
        "accuracy": _figure("best_accuracy", ".2%"),
        "images/s": RATE,
        "compiling, s": _figure("compile_s", ".0f"),
    },
    "profile": {"images/s": RATE, "a step, ms": _figure("step_s", ".1f", 1e3)},
}
BARS = {"ResNet-50": "images/s of training", "loader": "images/s on the device"}  # groups that are drawn


def group_of(record: Record) -> str:
    return record["step"].partition(": ")[0]


def way_of(record: Record) -> str:
    return record["step"].partition(": ")[2]


def rates(record: Record, group: str) -> dict[str, float]:
    """Return the images/s of each step of a group that is done."""
    return {
        way_of(step): step["figures"]["images_per_s"]["median"]
        for step in record["steps"]
        if step["status"] == "done" and group_of(step) == group
    }


def compare_with_goals(record: Record) -> list[tuple[str, str, str]]:
    """Return the goals, what was measured, and whether that reaches the goal: "yes", "no" or "not measured"."""
    trained, loaded = rates(record, "ResNet-50"), rates(record, "loader")
    best = max(trained.values(), default=None)
    dali = max((rate for way, rate in loaded.items() if way.startswith("dali")), default=None)
    rows = [
        (f"ResNet-50 trains more than {goal:,} images/s ({name})", best, best is not None and best > goal, ",.0f")
        for name, goal in PUBLISHED.items()
    ]
    ahead = dali / best if dali is not None and best is not None else None
    name = f"DALI loads {DALI_AHEAD:g} times the images/s of the fastest training"
    rows.append((name, ahead, ahead is not None and ahead >= DALI_AHEAD, ".2f"))
    added = [step["figures"]["added"] for step in record["steps"] if step["step"] == "K-FAC's step: cholesky"
             and step["status"] == "done"]  # fmt: skip
    name = f"K-FAC 10/100 adds at most {KFAC_MAY_ADD:.0%} to a step of SGD"
    rows.append((name, added[0] if added else None, bool(added) and added[0] <= KFAC_MAY_ADD, "+.1%"))
    return [
        (name, "–", "not measured") if value is None else (name, format(value, form), "yes" if is_met else "no")
        for name, value, is_met, form in rows
    ]


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """Return a table of "figures" or "texts" in HTML, which scrolls by itself if it is wider than the page."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table class="{kind}">{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def draw_rates(record: Record, group: str, title: str) -> str:
    """Return bars of the images/s of a group, the published figures beside those of the training."""
    bars = []
    for step in record["steps"]:
        if step["status"] == "done" and group_of(step) == group:
            rate = step["figures"]["images_per_s"]
            bars.append(Bar(way_of(step), rate["median"], rate["min"], rate["max"], is_ours=True))
    if not bars:
        return ""
    if group == "ResNet-50" and not record["dry_run"]:
        bars += [Bar(name, float(goal)) for name, goal in PUBLISHED.items()]
    plot = Plot([Bars(title, "images/s", bars, "more")], "medians, the least and the greatest")
    return svg_for_page(draw(plot, "light").encode(), title)


def write_group(record: Record, group: str) -> str:
    steps = [step for step in record["steps"] if group_of(step) == group]
    columns = COLUMNS[group]
    rows = [
        [way_of(step), *(show(step["figures"]) for show in columns.values())]
        for step in steps
        if step["status"] == "done"
    ]
    parts = [f"<h2>{escape(group)}</h2>", draw_rates(record, group, BARS[group]) if group in BARS else ""]
    parts += [write_table(["", *columns], rows)] if rows else []
    parts += [f'<p class="muted">{escape(failure)}</p>' for step in steps
              for failure in step.get("figures", {}).get("failures", ())]  # fmt: skip
    for step in steps:
        if step["status"] != "done":
            error = f": {step['error']}" if step.get("error") else ""
            parts.append(f"<p><b>{escape(way_of(step))}</b> – {escape(step['status'])}{escape(error)}</p>")
            if tail := escape(step.get("tail", "")):
                parts.append(f"<details><summary>the end of its output</summary><pre>{tail}</pre></details>")
    return "\n".join(parts)


def describe_code(record: Record) -> str:
    """Say of which commit the code is; what cannot be known is said to be unknown."""
    changed = {None: ", whether changed is unknown", True: ", with uncommitted changes", False: ""}
    return f"{record['commit'] or 'unknown'}{changed[record['uncommitted_changes']]}"


def write_page(path: Path, record: Record) -> None:
    """Write the page of a record, as `run_steps` makes it."""
    here = record["environment"]
    versions = ", ".join(f"{name} {version or 'is missing'}" for name, version in here["versions"].items())
    memory_bytes = here.get("gpu_memory_bytes")
    machine = {
        "GPU": f"{here.get('gpu') or 'none'}{f', {memory_bytes / 2**30:.0f} GiB' if memory_bytes else ''}",
        "driver": here.get("driver") or "unknown",
        "CUDA, cuDNN": f"{here.get('cuda') or 'unknown'}, {here.get('cudnn') or 'unknown'}",
        "processor": f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB",
        "system": f"{here['system']}, Linux {here['kernel']}",
        "versions": versions,
        "commit": describe_code(record),
        "begun": here["date"],
        "measured for": f"{sum(step['seconds'] for step in record['steps']) / 60:.1f} minutes",
    }
    title = "Benchmarks on one GPU"
    note = "A dry run on the processor, at tiny sizes: no figure here means anything." if record["dry_run"] else ""
    groups = [group for group in COLUMNS if any(group_of(step) == group for step in record["steps"])]
    body = [
        f"<h1>{title}</h1>",
        f"<p><b>{note}</b></p>" if note else "",
        "<h2>Goals</h2>",
        write_table(["goal", "measured", "reached"], compare_with_goals(record)),
        *(write_group(record, group) for group in groups),
        "<h2>Machine</h2>",
        write_table(["", ""], [*machine.items()], "texts"),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    text = f"<!doctype html>\n<html lang=en>{head}<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(body)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n</html>\n", encoding="utf-8")
    temporary.replace(path)
