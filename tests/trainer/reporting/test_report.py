"""The report against the metrics.jsonl it was made from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from contextlib import contextmanager, nullcontext
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from datapipe.errors import DatapipeError, SettingError
from datapipe.fsio import atomic_write
from trainer.reporting import plots
from trainer.reporting.curves import MAX_POINTS, curve_points
from trainer.reporting.page import write_report
from trainer.reporting.runlog import SECTIONS, read_run

STEPS = 100  # per epoch
TIME_S = {  # as earlier versions wrote it: without what comes before the first step
    "wait": 3.0,
    "forward_backward": 6.0,
    "optimizer": 1.0,
    "evaluation": 2.0,
    "checkpoint": 0.5,
    "other": 0.25,
}


def header(**changes) -> dict:
    recipe = {"data": {"size": 28, "backend": "cpu"}, "model": {"name": "resnet8"}}
    recipe["train"] = {"target_accuracy": 0.9, "epochs": 3, "batch_size": 512}
    return {
        "event": "run",
        "format": 1,
        "recipe": recipe,
        "recipe_name": "fashion-mnist-resnet8",
        "commit": "abc1234",
        "versions": {"python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.6", "datapipe": "0.1.0"},
        "device": "cpu (Some Model 5000)",
        "world_size": 1,
        "global_batch_size": 512,
        "train_samples": 51200,
        "val_samples": 10000,
        "num_parameters": 77754,
        "started": "2025-01-02T03:04:05+00:00",
        "command": ["trainer", "train", "fashion-mnist-resnet8"],
    } | changes


def train(step: int, loss: float = 1.0, **changes) -> dict:
    line = {"event": "train", "epoch": (step - 1) // STEPS, "step": step, "loss": loss, "lr": 0.1}
    return line | {"images_per_s": 2500.0, "elapsed_s": step / 10} | changes


def epoch(number: int, accuracy: float | None, **changes) -> dict:
    line = {"event": "epoch", "epoch": number, "step": number * STEPS, "train_loss": 0.7, "val_loss": 0.8}
    line |= {"val_accuracy": accuracy, "images_per_s": 2000.0, "elapsed_s": number * 12.75, "time_s": TIME_S}
    return line | changes


def end(**changes) -> dict:
    return {
        "event": "end",
        "status": "target_reached",
        "accuracy": 0.9123,
        "best_accuracy": 0.9145,
        "time_to_target_s": 174.4,
        "elapsed_s": 201.0,
        "images_per_s": 2345.6,
        "wait_share": 0.314,
        "time_s": {part: 10 * seconds for part, seconds in TIME_S.items()},
    } | changes


def write(folder: Path, *lines: dict | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def finished(folder: Path, world_size: int = 1, **changes) -> Path:
    steps = [train(step) for step in range(10, 301, 10)]
    epochs = [epoch(1, 0.85), epoch(2, 0.9145), epoch(3, 0.9123)]
    return write(folder, header(world_size=world_size), *steps, *epochs, end(**changes))


class Page(HTMLParser):
    """The visible text of a page, its tables as rows of cells, and every tag with its attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict]] = []
        self._within, self.words = "", []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))  # also no-break spaces

    def handle_starttag(self, tag, attrs):
        self._within = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("table", "b"):
            self._within = tag if tag == "table" else "td"

    def handle_data(self, data):
        if self._within not in ("style", "script"):
            self.words.append(data)
        if self._within in ("td", "th") and self.rows:
            self.rows[-1][-1] += data.replace("\N{NO-BREAK SPACE}", " ").strip()

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


def text_of_pdf(path: Path) -> list[str]:
    """Return the text of each page, line after line."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", path.read_bytes(), re.DOTALL)
    pages = []
    for stream in streams:
        try:
            content = zlib.decompress(stream).decode("latin-1")
        except zlib.error:
            continue  # a picture, or a font
        if re.search(r"\bBT\b", content):
            letters = "".join(re.findall(r"\((.*?)(?<!\\)\)", content, re.DOTALL))
            pages.append(letters.replace("\0", "").replace("\N{NO-BREAK SPACE}", " "))
    return pages


@pytest.fixture
def without_plots(monkeypatch):
    """For what is said in words only: the plots take most of the time."""
    monkeypatch.setattr("trainer.reporting.page.write_plots", lambda *_: [])


def leave_pdf_out(patch: pytest.MonkeyPatch) -> None:
    """Write no report.pdf, whose letters take longer than a plot."""
    nothing = SimpleNamespace(savefig=lambda _: None)
    patch.setattr(plots, "draw_text_pages", lambda _: [])
    patch.setattr("matplotlib.backends.backend_pdf.PdfPages", lambda *_, **__: nullcontext(nothing))


@pytest.fixture
def only_plots(monkeypatch):
    """only_plots("loss", …, pdf=False): draw no others."""

    def _only_plots(*names: str, pdf: bool = False) -> None:
        monkeypatch.setattr(plots, "PLOTS", [plot for plot in plots.PLOTS if plot.name in names])
        if not pdf:
            leave_pdf_out(monkeypatch)

    return _only_plots


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """The report on one finished run."""
    folder = tmp_path_factory.mktemp("single")
    report = write_report([finished(folder / "run")], folder / "out")
    assert report == folder / "out" / "report.html"
    return report


def test_a_single_run_shows_the_figures_of_its_end_line(single):
    page = Page(single)
    for text in (
        "accuracy 91.23 %",
        "target 90.00 %",
        "time to target 2 min 54 s",
        "images/s 2,346",
        "waiting for data 31.4 %",
        "status target reached",
        "data-bound: 31.4 % of the steps' time was spent waiting for batches",
        "cpu (Some Model 5000)",
        "abc1234",
        "trainer train fashion-mnist-resnet8",
        "resnet8",
        "2.13.0",
    ):
        assert text in page.text, text
    shown = {part: page.row(part)[1] for part in SECTIONS}
    assert shown == {
        "staging": "0.0 s",
        "start": "0.0 s",
        "compile": "0.0 s",
        "wait": "30.0 s",
        "forward_backward": "1 min 00 s",
        "optimizer": "10.0 s",
        "evaluation": "20.0 s",
        "checkpoint": "5.0 s",
        "other": "2.5 s",
    }


@pytest.mark.parametrize(("share", "bound"), [(0.314, "data-bound: 31.4 %"), (0.004, "not data-bound: 0.4 %")])
def test_the_verdict_follows_the_wait_share(tmp_path, without_plots, share, bound):
    page = Page(write_report([finished(tmp_path / "run", wait_share=share)], tmp_path / "out"))
    assert f"{bound} of the steps' time was spent waiting for batches" in page.text


def test_two_processes_may_write_the_same_report(tmp_path, monkeypatch, only_plots):
    """A run that has just ended, and who watches it: here the second writes all of it while the first does."""
    only_plots("time", pdf=True)
    run, before = finished(tmp_path / "run"), plots.draw_text_pages
    left, recent = (run / f".report.pdf.{digit * 32}.partial" for digit in "ab")  # of others, of which one was killed
    left.touch()
    recent.touch()
    os.utime(left, (0, 0))

    def interrupted(tables):
        monkeypatch.setattr(plots, "draw_text_pages", before)
        write_report([run], run)
        return before(tables)

    monkeypatch.setattr(plots, "draw_text_pages", interrupted)
    write_report([run], run)
    assert (run / "report.pdf").read_bytes().rstrip().endswith(b"%%EOF")
    assert [*run.glob(".*.partial")] == [recent]


@pytest.mark.parametrize(("module", "name"), [("page", "report.html"), ("mlperf", "mlperf.log"), ("plots", "time.png")])
def test_two_processes_may_write_each_file_of_a_report(tmp_path, monkeypatch, only_plots, module, name):
    """The second writes all of its report while the first is at this file."""
    only_plots("time")
    monkeypatch.setattr("trainer.reporting.mlperf._log", lambda _: [{"key": "seed"}])
    run, writer, written = finished(tmp_path / "run"), f"trainer.reporting.{module}.atomic_write", []

    @contextmanager
    def interrupted(path: Path, **settings):
        with atomic_write(path, **settings) as file:
            if path.name == name:
                monkeypatch.setattr(writer, atomic_write)
                written.append(write_report([run], run))
            yield file

    monkeypatch.setattr(writer, interrupted)
    write_report([run], run)
    assert written and (run / name).stat().st_size > 0 and not [*run.glob(".*.partial")]


def test_every_plot_is_in_the_page_the_pdf_and_files_of_its_own(single):
    out = single.parent
    plots = ("accuracy", "loss", "learning-rate", "throughput", "time")
    names = {"report.html", "report.pdf", *(f"{name}.{kind}" for name in plots for kind in ("png", "pdf"))}
    assert {path.name for path in out.iterdir()} == names  # and nothing temporary is left
    pdf = (out / "report.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type /Page\b", pdf)) == 1 + len(plots)  # the first is text
    for path in out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    for name in plots:
        pdf = (out / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type /Page\b", pdf)) == 1
    page = Page(out / "report.html")
    assert [tag for tag, _ in page.tags].count("svg") == 2 * len(plots)  # for wide and for narrow screens
    for label in ("validation accuracy", "images/s", "epoch", "time (s)", "target 90.0 %", "wait for data"):
        assert label in page.text
    assert "compilation" not in page.text  # it took no time


def changes(report: Path) -> list[str]:
    """Return the sentences of the section about them."""
    source = report.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ").replace("&#39;", "'")
    return re.findall(r"<li>(.*?)</li>", source[source.index("<h2>What to change") :].split("</ol>")[0])


GPU = {"hosts": 1, "cores": 8, "memory_bytes": 64 * 2**30, "gpu_memory_bytes": 80 * 2**30}
CPU = {"hosts": 1, "cores": 8, "memory_bytes": 64 * 2**30}


@pytest.mark.parametrize(
    ("begin", "finish", "says"),
    [
        ({"hardware": CPU, "loader_threads": 2}, {}, "data.threads = 8 (now 2): each rank has 8 cores."),
        ({"hardware": CPU, "loader_threads": 2, "world_size": 2}, {}, "data.threads = 4 (now 2)"),
        ({"hardware": CPU, "loader_threads": 2, "cores_per_rank": 6}, {}, "data.threads = 6 (now 2): each rank has 6"),
        ({"hardware": GPU, "device": "cuda (H100)"}, {}, "data.backend = 'dali' (now 'cpu')"),
        (
            {},
            {},
            "makes each step wait 68.5 ms: datapipe bench tells whether the loader alone exceeds this run's 2,346",
        ),
        ({"hardware": CPU, "threads": 1}, {"wait_share": 0.01}, "OMP_NUM_THREADS = 8 (now 1)"),
        (
            {"hardware": GPU, "device": "cuda (H100)", "world_size": 2},
            {"wait_share": 0.01, "ranks": [{"gpu_memory_bytes": 2**30}, {"gpu_memory_bytes": 20 * 2**30}]},
            "train.batch_size = 1024 (now 512, 256 per rank) fills the device better; 25% of the memory is in use.",
        ),
        (
            {"hardware": CPU, "world_size": 2},
            {"ranks": [{"memory_bytes": 30 * 2**30}, {"memory_bytes": 31 * 2**30}]},
            "memory: 97% is in use",
        ),
        ({}, {"time_s": TIME_S}, "train.evaluate_every = 2 (now 1) evaluates half as often"),
        ({}, {"time_s": TIME_S}, "evaluation took 16% of the run, 2.0 s."),
        ({}, {"time_s": TIME_S | {"checkpoint": 5.0}}, "minutes is 10 now: checkpoint took 29% of the run, 5.0 s."),
        ({}, {"time_s": TIME_S | {"compile": 40.0}}, "so short a run: compile took 76% of the run, 40.0 s."),
        ({}, {"time_s": TIME_S | {"staging": 40.0}}, "before the run begins: staging took 76% of the run, 40.0 s."),
        ({}, {}, "trainer profile tells what of the other 69% of the steps' time (1 min 09 s) is computing"),
    ],
)
def test_what_to_change_has_its_number(tmp_path, without_plots, begin, finish, says):
    run = write(tmp_path / "run", header(**begin), train(10), epoch(1, 0.85), end(**finish))
    sentences = changes(write_report([run], tmp_path / "out"))
    assert any(says in sentence for sentence in sentences), sentences
    assert all(re.search(r"\d.*\.$", re.sub("bf16", "", sentence)) for sentence in sentences)
    assert not any(re.search(r"\bnan\b", sentence) for sentence in sentences)


def test_nothing_is_advised_that_is_done_already(tmp_path, without_plots):
    """Advice of evaluations, of memory, and of threads depends on what took long, was full, or had more cores."""
    time_s = TIME_S | {"evaluation": 0.5}
    begin = header(hardware=CPU, precision="bf16", threads=8, loader_threads=8, compiled=True)
    begin["recipe"]["train"]["compile"] = "auto"
    run = write(tmp_path / "run", begin, epoch(1, 0.85), end(wait_share=0.0, time_s=time_s, ranks=[{}]))
    assert [sentence[:15] for sentence in changes(write_report([run], tmp_path / "out"))] == ["trainer profile"]


def test_each_of_several_runs_has_what_to_change(tmp_path, without_plots):
    runs = [finished(tmp_path / "a"), finished(tmp_path / "b", wait_share=0.01)]
    page = Page(write_report(runs, tmp_path / "out"))
    assert page.source.count("<h3>what to change</h3>") == 2
    assert page.text.count("trainer profile tells what of the other") == 2
    assert "the other 69%" in page.text and "the other 99%" in page.text


def test_the_pdf_begins_with_the_text_of_the_page(tmp_path, only_plots):
    only_plots("loss", pdf=True)
    begin = header(hardware=CPU | {"cpu": "Some Model 5000"}, loader_threads=2)
    begin["recipe"]["train"]["note"] = "x" * 200
    out = write_report([write(tmp_path / "run", begin, train(10), epoch(1, 0.85), end())], tmp_path / "out").parent
    text, *plots = text_of_pdf(out / "report.pdf")
    for words in ("91.23", "2 min 54 s", "2,346", "Some Model 5000", "64.0", "2.13.0", "batch_size", "512", "abc1234"):
        assert words in text, words
    assert "data.threads = 8" in text and "hardware" in text and "versions" in text
    assert "x" * 84 in text and "x" * 85 not in text  # longer values continue in the next line
    assert not any("Some Model 5000" in page for page in plots)


def test_many_settings_take_several_pages(tmp_path, only_plots):
    only_plots("time", pdf=True)
    several = [header(), header()]
    several[0]["recipe"]["train"] |= {f"setting_{i}": i for i in range(60)}
    runs = [write(tmp_path / name, begin, end()) for name, begin in zip("ab", several, strict=True)]
    write_report(runs, tmp_path / "out")
    pages = text_of_pdf(tmp_path / "out" / "report.pdf")
    assert [f"setting_{i}" in "".join(pages[:2]) for i in range(60)] == [True] * 60
    assert "setting_59" not in pages[0] and "setting_0" not in pages[2] and "abc1234" in pages[2]


def test_ranks_memory_hardware_and_kfac_are_shown(tmp_path, only_plots):
    only_plots("learning-rate", "kfac", "ranks")
    hardware = {"hosts": 2, "cpu": "Some Model 5000", "cores": 8, "memory_bytes": 16 * 2**30}
    ranks = [
        {"rank": rank, "host": f"node{rank}", "wait_share": 0.25 * rank, "memory_bytes": (1 + rank) * 2**30,
         "gpu_memory_bytes": 3 * 2**29, "time_s": TIME_S}
        for rank in range(2)
    ]  # fmt: skip
    kfac = {"event": "kfac", "epoch": 0, "step": 50, "elapsed_s": 5.0, "factor_updates": 40, "solution_updates": 20,
            "cosines": {"a": 0.5, "b": 0.75, "c": None}, "skipped": 0, "fallbacks": 1, "damping": 0.003,
            "clipped": 48, "clip_steps": 50}  # fmt: skip
    lost = kfac | {"step": 60, "factor_updates": 48}
    resume = {"event": "resume", "epoch": 0, "step": 50, "elapsed_s": 5.0, "world_size": 2}
    again = kfac | {
        "step": 60,
        "factor_updates": 8,
        "cosines": {"a": 0.25, "b": 0.26, "c": 0.9},
        "clipped": 9,
        "clip_steps": 10,
    }
    begin = header(world_size=2, hardware=hardware)
    lines = [begin, train(50), kfac, train(60), lost, resume, train(60), again, epoch(1, 0.85)]
    out = tmp_path / "out"
    page = Page(write_report([write(tmp_path / "run", *lines, end(ranks=ranks))], out))
    assert page.row("hosts") == ["hosts", "2"] and page.row("memory") == ["memory", "16.0 GiB"]
    columns = ["rank", "host", "wait for data", "forward + backward", "optimizer", "memory", "gpu memory"]
    assert page.row("rank") == columns
    assert page.row("1") == ["1", "node1", "3.0 s (25.0 %)", "6.0 s", "1.0 s", "2.0 GiB", "1.5 GiB"]
    assert "memory 2.0 GiB gpu memory 1.5 GiB" in page.text  # that of the rank that had most
    assert [page.row(name)[1] for name in ("factor updates", "fallbacks", "median cosine")] == ["48", "1", "0.26"]
    assert page.row("steps bound by the clip")[1] == "95 % of 60"
    (advice,) = [line for line in changes(out / "report.html") if "kfac" in line]
    assert advice.startswith("kfac.kl_clip (now None) bound 95% of 60 steps, so that it decided how long they were")
    for title in ("K-FAC", "Where each rank's time went", "Learning rate"):
        assert title in page.text
    files = [out / f"{name}.{kind}" for name in ("kfac", "ranks") for kind in ("png", "pdf")]
    assert all(path.exists() for path in files)
    assert {key: read_run(tmp_path / "run").kfac[-1][key] for key in ("cosine", "lowest_cosine")} == {
        "cosine": 0.26,
        "lowest_cosine": 0.25,
    }
    write_report([finished(tmp_path / "other")], out)
    assert not any(path.exists() for path in files)


def test_training_is_beside_validation(tmp_path, only_plots):
    only_plots("accuracy", "loss")
    epochs = [epoch(i, 0.3 * i, train_accuracy=0.25 * i, train_loss=2 - i / 2) for i in (1, 2)]
    run = write(tmp_path / "run", header(), *epochs, end())  # of fewer steps than `log_every`
    page = Page(write_report([run], tmp_path / "out"))
    assert "training accuracy 50.00 % training loss 1.0000" in page.text
    for name in ("training accuracy", "validation accuracy", "training", "validation"):
        assert f"{name}</text>" in (tmp_path / "out" / "report.html").read_text()
    for plot, key, values in (("accuracy", "train_accuracy", [0.25, 0.5]), ("loss", "loss", [1.5, 1.0])):
        (curve,) = [curve for p in plots.PLOTS if p.name == plot for curve in p.curves if curve.key == key]
        assert [point.value for point in curve_points(read_run(run), curve)] == values
    longer = write(tmp_path / "longer", header(), *(train(i, loss=3.0) for i in (10, 20, 30)), *epochs, end())
    assert [point.value for point in curve_points(read_run(longer), curve)] == [3.0] * 3


def test_a_run_of_an_earlier_version_has_no_training_accuracy(tmp_path, only_plots):
    only_plots("accuracy")
    page = Page(write_report([write(tmp_path / "run", header(), epoch(1, 0.5), end())], tmp_path / "out"))
    assert "training accuracy –" in page.text
    assert "training accuracy</text>" not in (tmp_path / "out" / "report.html").read_text()


def test_what_comes_before_the_first_step_is_shown_apart(tmp_path, only_plots):
    only_plots("time")
    time_s = TIME_S | {"staging": 30.0, "start": 20.0, "compile": 40.0}
    page = Page(write_report([finished(tmp_path / "run", time_s=time_s)], tmp_path / "out"))
    assert [page.row(part)[1] for part in ("staging", "start", "compile")] == ["30.0 s", "20.0 s", "40.0 s"]
    for label in ("staging</text>", "start</text>", "compilation</text>"):
        assert label in page.source


def test_the_page_needs_nothing_from_elsewhere_and_follows_the_mode(single):
    page = Page(single)
    assert not re.search(r"https?://|@import|<script|<link|<img|url\((?!#)", page.source)
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key.endswith(("href", "src"))]
    assert all(link.startswith("#") for link in links)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {link[1:] for link in links} <= ids
    assert "prefers-color-scheme: dark" in page.source and str(single.parent.parent) not in page.source
    svg = page.source[page.source.index("<svg") :]
    assert "var(--c0)" in svg and "#0072b2" not in svg


def test_several_runs_are_compared_in_order(tmp_path, only_plots):
    only_plots("loss", "time")
    one = finished(tmp_path / "one" / "run")
    two = finished(tmp_path / "two" / "run", 2, images_per_s=4691.2, wait_share=0.05, status="completed")
    page = Page(write_report([one, two], tmp_path / "out"))
    head = page.row("run")
    rows = [dict(zip(head, page.rows[i], strict=True)) for i in (1, 2)]
    assert [row["run"].lstrip("■\N{NO-BREAK SPACE} ") for row in rows] == ["one/run · 1 rank", "two/run · 2 ranks"]
    assert [row["images/s"] for row in rows] == ["2,346", "4,691"]
    assert [row["relative"] for row in rows] == ["1.00×", "2.00×"]
    assert [row["waiting for data"] for row in rows] == ["31.4 %", "5.0 %"]
    assert [row["status"] for row in rows] == ["target reached", "completed"]
    assert {row["best accuracy"] for row in rows} == {"91.45 %"}
    assert {row["time to target"] for row in rows} == {"2 min 54 s"}
    assert {row["recipe name"] for row in rows} == {"fashion-mnist-resnet8"}
    assert {row["global batch size"] for row in rows} == {"512"}
    assert page.source.count("one/run · 1 rank</text>") == 2 * 2  # named in each plot
    assert "var(--c0)" in page.source and "var(--c1)" in page.source


def labels(*folders: Path) -> list[str]:
    page = Page(write_report(list(folders), folders[0].parent / "out"))
    return [row[0].lstrip("■\N{NO-BREAK SPACE} ") for row in page.rows[1 : 1 + len(folders)]]


def test_labels_are_distinct_and_no_longer_than_needed(tmp_path, without_plots):
    a, b, c = (finished(tmp_path / name) for name in ("x/a", "x/b", "y/a"))
    assert labels(a, b) == ["a", "b"]
    assert labels(a, c) == ["x/a", "y/a"]
    assert labels(a, a) == ["a (1)", "a (2)"]


def test_a_label_that_matplotlib_would_read_its_own_way(tmp_path, only_plots):
    only_plots("loss")
    run, other = finished(tmp_path / "_$x^2$ & <b>"), finished(tmp_path / "other")
    page = Page(write_report([run, other], tmp_path / "out"))
    assert page.source.count("_$x^2$ &amp; &lt;b&gt;</text>") == 2  # for wide and for narrow screens


def test_the_same_input_gives_the_same_bytes(tmp_path, only_plots):
    only_plots("time", pdf=True)
    run = finished(tmp_path / "run")
    first, again = (write_report([run], tmp_path / name).parent for name in ("first", "again"))
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_a_run_still_going_shows_the_figures_so_far(tmp_path, only_plots):
    only_plots("accuracy")
    cut = json.dumps(train(310))[:40]
    run = write(tmp_path / "run", header(), train(50), epoch(1, 0.85), epoch(2, 0.91), epoch(3, None), cut)
    assert read_run(run).figures() == pytest.approx(
        {
            "target": 0.9,
            "accuracy": 0.91,
            "best_accuracy": 0.91,
            "time_to_target_s": 25.5,
            "images_per_s": 2000,
            "wait_share": 0.3,
        }
    )
    page = Page(write_report([run], tmp_path / "out"))
    assert "status in progress" in page.text and "No end line" in page.text
    assert "data-bound: 30.0 %" in page.text and page.row("wait")[1] == "9.0 s"


@pytest.mark.parametrize("lines", [[], [train(10)], [end(accuracy=None, wait_share=None, time_s={})]])
def test_a_run_without_an_epoch_has_a_report(tmp_path, lines, only_plots):
    only_plots("throughput", "time")
    page = Page(write_report([write(tmp_path / "run", header(), *lines)], tmp_path / "out"))
    assert "No epoch has finished" in page.text and "Too early to tell" in page.text
    assert "nan" not in page.text.lower()


def test_the_one_point_of_a_single_epoch_is_seen(tmp_path, only_plots):
    only_plots("accuracy")
    run = write(tmp_path / "run", header(), epoch(1, 0.85), end())
    source = write_report([run], tmp_path / "out").read_text(encoding="utf-8")
    accuracy = source[source.index("<svg") : source.index("</svg>")]
    assert accuracy.count("fill: var(--c0)") >= 2  # by epoch and by time


def test_what_a_resumed_run_did_again_counts_once(tmp_path, without_plots):
    lost = [train(step, 9.0) for step in (110, 120, 130, 140)]
    again = [train(step, 1.0) for step in (110, 120)]
    resume = {"event": "resume", "epoch": 1, "step": 100, "elapsed_s": 12.75, "world_size": 2}
    stopped = end(status="interrupted")
    path = write(tmp_path / "run", header(), train(100), epoch(1, 0.5), *lost, stopped, resume, epoch(1, 0.6), *again)
    run = read_run(path)
    assert [(line["step"], line["loss"]) for line in run.train] == [(100, 1.0), (110, 1.0), (120, 1.0)]
    assert [line["val_accuracy"] for line in run.epochs] == [0.6]
    assert run.end is None
    assert "Resumed at step 100, world size 2" in Page(write_report([path], tmp_path / "out")).text


def test_a_line_cut_short_by_a_kill_loses_nothing_else(tmp_path):
    resume = {"event": "resume", "epoch": 0, "step": 20, "elapsed_s": 2.0, "world_size": 1}
    cut = json.dumps(train(30))[:25]
    run = read_run(write(tmp_path / "run", header(), train(10), train(20), cut, resume, train(30), "\0\0\0"))
    assert [line["step"] for line in run.train] == [10, 20, 30]
    assert run.resumes == [resume]


def test_a_loss_that_diverged_is_named_and_left_out_of_the_plot(tmp_path, only_plots):
    only_plots("loss")
    lines = [train(10), train(20, float("nan")), train(30, float("inf"))]
    page = Page(write_report([write(tmp_path / "run", header(), *lines)], tmp_path / "out"))
    assert "no longer finite at step 20" in page.text


def test_a_long_run_stays_small(tmp_path, monkeypatch):
    """With all plots."""
    leave_pdf_out(monkeypatch)
    lines = [train(step, images_per_s=2000.0 + step % 7) for step in range(1, 20 * MAX_POINTS)]
    report = write_report([write(tmp_path / "run", header(), *lines)], tmp_path / "out")
    assert report.stat().st_size < 200_000


def test_what_comes_from_files_is_text_never_markup(tmp_path, only_plots):
    only_plots("time")
    attack = "</text></svg><script>alert(1)</script>\"'&"
    first = header(recipe_name=attack, device=attack, commit=attack, versions={attack: attack})
    first |= {"command": [attack], "recipe": {attack: {attack: attack}, "flat": attack}, "world_size": attack}
    runs = [write(tmp_path / name, first, train(10), end(status=attack)) for name in ("<i>a", "b")]
    for folders in (runs, runs[:1]):
        page = Page(write_report(folders, tmp_path / "out"))
        assert "<script" not in page.source and "<i>" not in page.source
        assert "alert(1)" in page.text


def test_characters_that_cannot_be_printed_do_no_harm(tmp_path, without_plots):
    run = write(tmp_path / "run", header(device="a\x00b\x1b[31m\ud800"), end())
    page = Page(write_report([run], tmp_path / "out"))
    assert "a\N{REPLACEMENT CHARACTER}b" in page.source and "\x1b" not in page.source


@pytest.mark.parametrize("text", ["", "\n", '{"event":"run","form', "no json", "[1]\n3\n", json.dumps(train(1))])
def test_a_file_without_a_first_line_is_an_error_with_its_path(tmp_path, text):
    run = write(tmp_path / "run", text)
    with pytest.raises(DatapipeError, match="does not begin with a whole line") as caught:
        write_report([run], tmp_path / "out")
    assert caught.value.path == run / "metrics.jsonl" and not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_an_error_with_its_path(tmp_path):
    run, empty = finished(tmp_path / "runs" / "seed-0"), tmp_path / "empty"
    for folder, says in (
        (empty, "is this the folder of a training run"),
        (run.parent, f"name its runs, such as {run}"),
    ):
        with pytest.raises(DatapipeError, match=says) as caught:
            write_report([run, folder], tmp_path / "out")
        assert caught.value.path == folder / "metrics.jsonl" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", [2, None, "1"])
def test_another_format_is_refused(tmp_path, version):
    with pytest.raises(DatapipeError, match=r"metrics\.jsonl: format .* reads format 1"):
        write_report([write(tmp_path / "run", header(format=version), end())], tmp_path / "out")


def test_a_recipe_that_is_none_is_an_error(tmp_path):
    with pytest.raises(DatapipeError, match="holds no recipe"):
        write_report([write(tmp_path / "run", header(recipe=[1]), end())], tmp_path / "out")


def test_a_run_keeps_its_own_report(tmp_path):
    runs = [finished(tmp_path / name) for name in "ab"]
    with pytest.raises(SettingError, match="a: is the folder of a run; a report on 2 runs needs a folder of its own"):
        write_report(runs, runs[0])
    assert [*runs[0].iterdir()] == [runs[0] / "metrics.jsonl"]


def test_no_run_at_all_is_a_setting_error(tmp_path):
    with pytest.raises(SettingError, match="runs"):
        write_report([], tmp_path / "out")


def test_importing_the_module_brings_neither_torch_nor_matplotlib():
    code = "import sys, trainer.reporting.page; sys.exit(bool({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
