"""The report on one run, or on several side by side: one HTML page, and its plots as PDF and PNG."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import harmonic_mean

from datapipe.errors import DatapipeError, SettingError
from datapipe.fsio import atomic_write, make_folder

FORMAT = 1  # of metrics.jsonl
DATA_BOUND_SHARE = 0.1  # below a tenth, a faster loader would gain little
MAX_POINTS = 400  # of a curve: more cannot be told apart on the page
DASH, SPACE = "\N{EN DASH}", "\N{NO-BREAK SPACE}"
PALETTE = {  # on white and in dark mode; after Okabe and Ito (2008), whose hues colour-blind readers tell apart
    "c0": "#0072b2 #5ab4ee", "c1": "#c24e00 #f58a4b", "c2": "#00855f #3cc79a", "c3": "#a8467f #e08fbd",
    "c4": "#d99a00 #ffd166", "c5": "#6b7683 #98a3af", "ink": "#1c2126 #e4e8ec", "muted": "#59636e #a0aab4",
    "line": "#dde1e6 #363d45", "paper": "#ffffff #15191d",
}  # fmt: skip
LIGHT = {name: pair.split()[0] for name, pair in PALETTE.items()}
PARTS = dict(wait="c1", forward_backward="c0", optimizer="c4", evaluation="c2", checkpoint="c3", other="c5")
PLOTS = {  # title, axis label, and the curves: key, kind of line, how it is drawn
    "accuracy": ("Accuracy", "validation accuracy", [("val_accuracy", "epochs", {})]),
    "loss": ("Loss", "loss", [("loss", "train", {"marker": "", "linestyle": "-", "label": "training"}),
                              ("val_loss", "epochs", {"linestyle": "--", "label": "validation"})]),
    "throughput": ("Speed", "images/s", [("images_per_s", "train", {"marker": ""})]),
    "time": ("Where the time went", "", []),
}  # fmt: skip
RC = {  # of matplotlib
    "svg.fonttype": "none", "svg.hashsalt": "report", "pdf.fonttype": 42, "text.parse_math": False,
    "text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["muted"], "axes.edgecolor": LIGHT["line"],
    "xtick.color": LIGHT["muted"], "ytick.color": LIGHT["muted"], "grid.color": LIGHT["line"],
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "lines.markersize": 4.5, "legend.handlelength": 1.6, "legend.columnspacing": 1.4, "legend.frameon": False,
}  # fmt: skip
STYLE = """
body{margin:auto;padding:2.5rem 1.25rem;max-width:66rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,sans-serif;overflow-wrap:anywhere} h1{font-size:1.7rem;line-height:1.25;margin:0}
h2{font-size:1.15rem;margin:2.75rem 0 .5rem} h3{font-size:.95rem;margin:0} p{margin:.4rem 0} summary{cursor:pointer}
dl,.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:1rem;margin:1.75rem 0 1rem}
dl div{border-top:2px solid var(--line);padding-top:.5rem} dd{margin:0;font-size:1.25rem;font-weight:600}
.wide{overflow-x:auto} .muted,th,dt{color:var(--muted);font-weight:400} dt{font-size:.85rem}
svg{display:block;width:100%;min-width:38rem;height:auto} svg text{font-family:system-ui,sans-serif!important}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;width:100%} .runs{margin:1rem 0}
th,td{text-align:left;vertical-align:top;padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line)}
.runs :is(td,th){overflow-wrap:normal} .runs :nth-child(n+4){text-align:right} tr>:last-child{padding-right:0}
.facts{grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:1.5rem 2rem} .facts th{width:45%}
"""


@dataclass
class Run:
    """What RUN/metrics.jsonl says, without the lines that a resumed run did again."""

    header: dict
    resumes: list[dict]
    train: list[dict]
    epochs: list[dict]
    end: dict | None
    label: str = ""  # tells it from the report's other runs

    def time_s(self) -> dict[str, float]:
        """Seconds spent in each of PARTS."""
        lines = [line.get("time_s") or {} for line in ([self.end] if self.end else self.epochs)]
        return {part: sum(_number(line.get(part), 0.0) for line in lines) for part in PARTS}

    def figures(self) -> dict[str, float]:
        """The figures of the end line, or what the epochs so far amount to; NaN where unknown."""
        target = _number(((self.header.get("recipe") or {}).get("train") or {}).get("target_accuracy"))
        seen = [(a, e.get("elapsed_s")) for e in self.epochs if (a := _number(e.get("val_accuracy"))) >= 0]
        rates = [_number(line.get("images_per_s")) for line in self.epochs or self.train]
        spent = self.time_s()
        step_s = spent["wait"] + spent["forward_backward"] + spent["optimizer"]
        so_far = {
            "accuracy": seen[-1][0] if seen else None,
            "best_accuracy": max((accuracy for accuracy, _ in seen), default=None),
            "time_to_target_s": next((elapsed_s for accuracy, elapsed_s in seen if accuracy >= target), None),
            "images_per_s": harmonic_mean([r for r in rates if r > 0] or [math.nan]),  # epochs of equal size
            "wait_share": spent["wait"] / step_s if step_s else None,
        }
        return {"target": target} | {key: _number((self.end or so_far).get(key)) for key in so_far}

    def notes(self) -> list[str]:
        """What a reader should know before trusting the figures."""
        notes = [] if self.end else ["No end line: the run is still going, or was killed. Figures are so far."]
        notes += [] if self.epochs else ["No epoch has finished."]
        notes += [f"Resumed at step {r.get('step')}, world size {r.get('world_size')}." for r in self.resumes]
        bad = [line.get("step") for line in self.train if math.isnan(_number(line.get("loss")))]
        return notes + [f"The training loss was no longer finite at step {step}." for step in bad[:1]]


def read_run(folder: Path) -> Run:
    """Read RUN/metrics.jsonl. DatapipeError when there is none, or none that this version can read."""
    path, events = folder / "metrics.jsonl", []
    if not path.is_file():
        raise DatapipeError("no such file: is this the folder of a training run?", path=path)
    text = path.read_text(encoding="utf-8", errors="replace")
    for found in re.finditer(r'\{"event"', text):  # a resumed run writes right behind a line cut short
        with suppress(ValueError, RecursionError):
            events.append(json.JSONDecoder().raw_decode(text, found.start())[0])
    if not events or events[0]["event"] != "run":
        raise DatapipeError("does not begin with a whole line about a run: killed at its start?", path=path)
    if not isinstance(events[0].get("recipe") or {}, dict):
        raise DatapipeError("its first line holds no recipe", path=path)
    if (version := events[0].get("format")) != FORMAT:
        raise DatapipeError(f"format {version!r}: this version reads format {FORMAT} only; upgrade it", path=path)
    lines = {kind: [] for kind in ("run", "resume", "train", "epoch", "end")}
    for event in events:
        kind, step = str(event["event"]), _number(event.get("step"))
        for again in ("train", "epoch", "end") if kind == "resume" else ():
            lines[again] = [line for line in lines[again] if _number(line.get("step")) <= step]
        lines.setdefault(kind, []).append(event)
    epochs = {line.get("epoch"): line for line in lines["epoch"]}  # a run resumed near its end reports it again
    return Run(events[0], lines["resume"], lines["train"], [*epochs.values()], (lines["end"] or [None])[-1])


def _number(value: object, default: float = math.nan) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else default


def _name_apart(runs: list[Run], folders: list[Path]) -> None:
    """Label each run with as much of the end of its path as tells it from the others."""
    paths = [folder.resolve().parts for folder in folders]
    ends = (["/".join(path[-n:]) for path in paths] for n in range(1, max(map(len, paths)) + 1))
    numbered = [f"{path[-1]} ({i})" for i, path in enumerate(paths, 1)]  # one folder given twice
    names = next((names for names in ends if len(set(names)) == len(names)), numbered)
    sizes = [run.header.get("world_size") for run in runs]
    for run, name, size in zip(runs, names, sizes, strict=True):
        ranks = f" · {size} rank{'s' * (size != 1)}" if sizes.count(size) < len(sizes) else ""
        run.label = re.sub("^_", f"{SPACE}_", _text(name[-40:] + ranks))  # legends leave out _names


def _text(value: object) -> str:
    """Any value as text in one line, nothing in it that cannot be printed."""
    value = " ".join(map(_text, value)) if isinstance(value, list) else value
    text = value if isinstance(value, str) else DASH if value is None else json.dumps(value)
    return "".join(c if c.isprintable() or c == SPACE else "\N{REPLACEMENT CHARACTER}" for c in text)


def _show(value: float, form: str) -> str:
    return DASH if math.isnan(value) else form.format(value).replace("%", f"{SPACE}%")


def _duration(value: object) -> str:
    if not (seconds := _number(value)) >= 60:
        return _show(seconds, f"{{:.1f}}{SPACE}s")
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
    return text.replace(" ", SPACE)


def _time_unit(seconds: list[object]) -> tuple[float, str]:
    longest = max((_number(one, 0.0) for one in seconds), default=0.0)
    return (3600, "h") if longest > 7200 else (60, "min") if longest > 180 else (1, "s")


def _points(run: Run, lines: list[dict], key: str) -> list[tuple[float, ...]]:
    """Epochs, seconds and values, at most MAX_POINTS of them; what is no number is left out."""
    head = {"step": run.header.get("train_samples"), "epoch": run.header.get("global_batch_size")}
    steps, epochs = (_number((run.epochs or [head])[0].get(name)) or math.nan for name in ("step", "epoch"))
    rows = [[_number(line.get(name)) for name in ("step", "elapsed_s", key)] for line in lines]
    rows = [(step / (steps / epochs), *rest) for step, *rest in rows if not math.isnan(sum([step, *rest]))]
    return list(zip(*rows[:: len(rows) // MAX_POINTS + 1], strict=True)) or [(), (), ()]


def _draw_curves(figure, runs: list[Run], name: str) -> list:
    """Draw the curves of one of PLOTS by epoch and by time; return what its legend shows."""
    panels, (_, label, curves), shown = figure.subplots(1, 2, sharey=True), PLOTS[name], []
    scale, unit = _time_unit([line.get("elapsed_s") for run in runs for line in run.train + run.epochs])
    for i, run in enumerate(runs):
        look = {"color": LIGHT[f"c{i % 6}"], "marker": "os^DvPX"[i % 7], "markevery": 0.03}
        shown += panels[0].plot([], [], **look, label=run.label) if len(runs) > 1 else []
        for key, kind, style in curves:
            epochs, seconds, values = _points(run, getattr(run, kind), key)
            panels[0].plot(epochs, values, **look | style)
            panels[1].plot([s / scale for s in seconds], values, **look | style)
    panels[0].set(xlabel="epoch", ylabel=label, xlim=(0, None))
    panels[1].set(xlabel=f"time ({unit})", xlim=(0, None))
    grey = {"color": LIGHT["muted"], "linestyle": ":"}
    if name == "accuracy":
        panels[0].yaxis.set_major_formatter(lambda value, _position: f"{100 * value:.4g}{SPACE}%")
        for target in sorted({run.figures()["target"] for run in runs if run.figures()["target"] > 0}):
            text = f"target {_show(target, '{:.1%}')}"
            shown += [axes.axhline(target, **grey, label=text) for axes in panels][:1]
    panels[0].set_ylim(0 if name == "throughput" else None)
    return shown + [panels[0].plot([], [], **grey | style)[0] for *_, style in curves if "label" in style]


def _draw_time(figure, runs: list[Run], _name: str) -> list:
    """Draw a bar of PARTS for each run; return what the legend shows."""
    axes, spent = figure.subplots(), [run.time_s() for run in runs]
    totals = [sum(one.values()) for one in spent]
    scale, unit = _time_unit(totals)
    left, shown = [0.0] * len(runs), []
    for part, colour in PARTS.items():
        label = "wait for data" if part == "wait" else part.replace("_", " + ")
        widths = [one[part] / scale for one in spent]
        shown.append(axes.barh(range(len(runs)), widths, 0.6, left, color=LIGHT[colour], label=label))
        left = [start + width for start, width in zip(left, widths, strict=True)]
        shares = [width * scale / (total or 1) for width, total in zip(widths, totals, strict=True)]
        wide = [one[part] > max(totals) / 22 for one in spent]  # enough to hold its share
        texts = [_show(share, "{:.0%}") * room for share, room in zip(shares, wide, strict=True)]
        axes.bar_label(shown[-1], texts, label_type="center", color="black" if colour == "c4" else LIGHT["paper"])
    axes.set(xlabel=f"time ({unit})", yticks=range(len(runs)), yticklabels=[run.label for run in runs])
    axes.set(xlim=(0, None), ylim=(len(runs) - 0.5, -0.5))  # the first run on top
    axes.grid(visible=False, axis="y")
    return shown


def _plot(figure, name: str, runs: list[Run], pdf, out: Path) -> str:
    """Draw one of PLOTS into `figure`, `pdf` and `out`/NAME.png; return it as SVG in the page's colours."""
    figure.set_size_inches(9, 3.4 + 0.1 * len(runs) if PLOTS[name][2] else 1.3 + 0.45 * len(runs))
    shown = (_draw_curves if PLOTS[name][2] else _draw_time)(figure, runs, name)
    if widths := [len(item.get_label()) + 6 for item in shown]:
        columns = len(shown) if sum(widths) <= 105 else max(1, 105 // max(widths))
        figure.legend(handles=shown, loc="outside upper left", ncols=columns)
    pdf.savefig(figure)
    figure.set_layout_engine("none")  # laid out once is enough
    with atomic_write(out / f"{name}.png") as image:
        figure.savefig(image, format="png", dpi=150)
    figure.savefig(file := io.StringIO(), format="svg", transparent=True, metadata={"Date": None})
    useless = r'^.*?(?=<svg)|<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"| id="\w+_\d+"'
    svg = re.sub(useless, "", file.getvalue(), flags=re.DOTALL)
    for colour, light in LIGHT.items():
        svg = svg.replace(light, f"var(--{colour})")
    return f'<h2>{PLOTS[name][0]}</h2><div class="wide">{svg}</div>'


def _overview(runs: list[Run]) -> str:
    """What a run comes to, or a table that compares several."""
    rows, figures = [], [run.figures() for run in runs]
    for run, one in zip(runs, figures, strict=True):
        head = ("recipe_name", "device", "world_size", "global_batch_size")
        rows.append({"run": run.label} | {key.replace("_", " "): _text(run.header.get(key)) for key in head} | {
            "accuracy": _show(one["accuracy"], "{:.2%}"), "best accuracy": _show(one["best_accuracy"], "{:.2%}"),
            "target": _show(one["target"], "{:.2%}"), "time to target": _duration(one["time_to_target_s"]),
            "images/s": _show(one["images_per_s"], "{:,.0f}"),
            "relative": _show(one["images_per_s"] / (figures[0]["images_per_s"] or math.nan), "{:.2f}×"),
            "waiting for data": _show(one["wait_share"], "{:.1%}"),
            "status": _text((run.end or {"status": "in progress"}).get("status")).replace("_", " "),
        })  # fmt: skip
    if len(runs) > 1:
        lines = ("<td>".join(map(escape, row.values())) for row in rows)
        keys = (f'<tr><td><b style="color:var(--c{i % 6})">■{SPACE}</b>{line}' for i, line in enumerate(lines))
        return f'<div class="wide runs"><table><tr><th>{"<th>".join(rows[0])}{"".join(keys)}</table></div>'
    cards = {key: text for key, text in list(rows[0].items())[5:] if key not in ("best accuracy", "relative")}
    html = "".join(f"<div><dt>{key}<dd>{escape(text)}</div>" for key, text in cards.items())
    share = figures[0]["wait_share"]
    bound = "data" if share >= DATA_BOUND_SHARE else "compute"
    verdict = f"{bound}-bound: {_show(share, '{:.0%}')} of the step waited for batches"
    return f"<dl>{html}</dl><p><b>{'Too early to tell what limits it' if math.isnan(share) else verdict}.</b></p>"


def _details(run: Run) -> str:
    """What was run, on what, with which settings, and where the time went."""
    head = {key: value for key, value in run.header.items() if key not in ("event", "format")}
    recipe, versions = dict(head.pop("recipe", None) or {}), head.pop("versions", None) or {}
    head |= {key: recipe.pop(key) for key in list(recipe) if not isinstance(recipe[key], dict)}
    time_s, html = {part: _duration(seconds) for part, seconds in run.time_s().items()}, ""
    for title, facts in {"run": head, "versions": versions, "time": time_s, **recipe}.items():
        rows = (f"<tr><th>{escape(_text(key))}<td>{escape(_text(value))}" for key, value in facts.items())
        html += f"<section><h3>{escape(_text(title))}</h3><table>{''.join(rows)}</table></section>"
    return f'<summary>{escape(run.label)}</summary><div class="facts">{html}</div></details>'


def write_report(runs: list[Path], out: Path) -> Path:
    """Write report.html, report.pdf and a PNG of each of PLOTS into `out`; return the path of report.html.

    `runs` are run folders, compared in this order. DatapipeError when one has no readable metrics.jsonl.
    """
    if not runs:
        raise SettingError("runs: [], but a report needs at least one run folder")
    if out.exists() and not out.is_dir():
        raise SettingError(f"out: {out} is a file; allowed: a folder, or a new name")
    loaded = [read_run(folder) for folder in runs]
    _name_apart(loaded, runs)
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    make_folder(out)
    with (matplotlib.rc_context(RC), atomic_write(out / "report.pdf") as file,
          PdfPages(file, metadata={"CreationDate": None}) as pdf):  # fmt: skip
        plots = "".join(_plot(Figure(layout="constrained"), name, loaded, pdf, out) for name in PLOTS)
    names = escape(", ".join(run.label for run in loaded))
    notes = "".join(f"<p>{escape(f'{run.label}: {note}')}" for run in loaded for note in run.notes())
    details = (f"<details{' open' * (len(runs) == 1)}>{_details(run)}" for run in loaded)
    light, dark = (";".join(f"--{name}:{pair.split()[i]}" for name, pair in PALETTE.items()) for i in (0, 1))
    page = f"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{names}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{STYLE}</style>
<h1>Training report</h1><p class="muted">{names}</p>{_overview(loaded)}{notes}{plots}
<h2>What was run</h2>{"".join(details)}</html>"""
    with atomic_write(out / "report.html") as file:
        file.write(page.encode())
    return out / "report.html"
