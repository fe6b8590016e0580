"""The report's page as a real browser shows it: headless Chromium, on a wide and a narrow screen, light and dark."""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from tests.trainer.reporting.test_report import TIME_S, end, epoch, finished, header, leave_pdf_out, train, write
from tests.waiting import limit_s
from trainer.reporting.page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
HIGH = 900  # of the screen, in pixels
WIDE, NARROW = 1200, 400
LEAST_CONTRAST = 4.5  # of text, WCAG 2.2, 1.4.3 (AA)
SMALLEST_TEXT = 10  # in a plot, in pixels, from the top of its line to the bottom


def seldom(*values: object) -> ParameterSet:
    """Return a parameter for --slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


VIEWS = [(WIDE, "light"), (NARROW, "dark"), seldom((WIDE, "dark")), seldom((NARROW, "light"))]

# What sticks out of the screen, or is cut off and has to be scrolled to.
OVERFLOWS = """() => [...document.querySelectorAll("body, body :not(svg *)")].filter(e => {
    const box = e.getBoundingClientRect();
    const isOut = e.checkVisibility() && box.width && (box.right > innerWidth + .5 || box.left < -.5);
    return isOut || e.scrollWidth > Math.max(e.clientWidth, box.width) + 1;
}).map(e => `${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 40)}`)"""

# Each text that is seen, its colour and the colour behind it: that of the nearest thing below that is filled.
TEXTS = """() => {
    const filled = e => {
        const style = getComputedStyle(e);
        const isShape = e instanceof SVGGeometryElement;
        const colour = isShape ? style.fill : e instanceof SVGElement ? "none" : style.backgroundColor;
        return colour == "none" || colour == "rgba(0, 0, 0, 0)" ? null : colour;
    };
    const holders = [...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
        && [...e.childNodes].some(n => n.nodeType == Node.TEXT_NODE && n.data.trim()));
    const before = [...document.querySelectorAll("td")].map(e => getComputedStyle(e, "::before"));
    const ofCells = before.filter(style => style.content != "none").map(
        style => [style.content, style.color, filled(document.body)]);
    return ofCells.concat(holders.map(e => {
        const box = e.getBoundingClientRect(), style = getComputedStyle(e);
        const stack = document.elementsFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
        const below = stack.includes(e) ? stack.slice(stack.indexOf(e) + 1) : stack;
        const own = e instanceof SVGElement ? null : filled(e);
        return [e.textContent.trim(), e instanceof SVGElement ? style.fill : style.color,
                own ?? below.map(filled).find(colour => colour) ?? filled(document.body)];
    }));
}"""

# The texts of each plot, with the sides of their boxes and those of the plot's, in pixels.
PLOTS = """() => [...document.querySelectorAll("svg")].filter(e => e.checkVisibility()).map(svg => {
    const sides = e => { const box = e.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; };
    return {title: svg.ariaLabel, sides: sides(svg),
            texts: [...svg.querySelectorAll("text")].map(e => [e.textContent.trim(), ...sides(e)])};
})"""


class View(NamedTuple):
    """A page that is open in the browser; `requested` and `complaints` are of what it did meanwhile."""

    page: sync_api.Page
    width: int
    mode: str
    requested: list[str]
    complaints: list[str]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as started:
        path = next(filter(None, map(shutil.which, NAMES)), None) or started.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium is installed: apt install chromium, or playwright install chromium")
        chromium = started.chromium.launch(executable_path=path)
        yield chromium
        chromium.close()


def with_everything(folder: Path, ranks: int) -> Path:
    """Write a run with ranks, K-FAC, a long name, a long command, and notes."""
    of_ranks = [
        {"rank": rank, "host": f"node{rank:03d}.cluster.example.org", "wait_share": 0.05 * rank, "time_s": TIME_S,
         "memory_bytes": 2**31, "gpu_memory_bytes": 2**33}
        for rank in range(ranks)
    ]  # fmt: skip
    hardware = {"hosts": ranks, "cpu": "AMD EPYC 9654 96-Core Processor", "cores": 96, "memory_bytes": 2**40}
    command = ["trainer", "train", "imagenet-resnet50", "--data", f"/shared/projects/{'vision' * 20}"]
    device = "cuda (NVIDIA H100 80GB HBM3)"
    lines = [header(world_size=ranks, hardware=hardware, command=command, device=device)]
    for step in range(10, 301, 10):
        cosines = {"conv1": 0.3 + 0.4 * step / 300, "fc": 0.9 - 0.3 * step / 300}
        kfac = {"event": "kfac", "step": step, "elapsed_s": step / 10, "cosines": cosines,
                "factor_updates": 3 * step, "solution_updates": step, "skipped": 0, "fallbacks": 0}  # fmt: skip
        lines += [train(step, 2 * math.exp(-step / 150), lr=0.1 * min(1, step / 50)), kfac]
        lines += [epoch(step // 100, 0.7 + 0.07 * (step // 100))] if step % 100 == 0 else []
    resume = {"event": "resume", "step": 300, "epoch": 3, "world_size": ranks, "waited_s": 99.0, "repeated_steps": 12}
    return write(folder, *lines, resume, end(ranks=of_ranks, time_s=TIME_S | {"compile": 4.0, "staging": 2.5}))


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Callable[[str], Path]:
    """Reports on one run, on three, and on one that has just begun, by name; each is written once."""
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def _write(name: str) -> Path:
        if name == "begun":
            return write_report([write(folder / "begun", header())], folder / "out" / "begun")
        runs = [with_everything(folder / "a-run-with-a-rather-long-name_lr0.1_batch512_seed0", 8)]
        if name == "three":
            runs += [with_everything(folder / "runs" / "other", 2), finished(folder / "third")]
        with pytest.MonkeyPatch.context() as patch:
            leave_pdf_out(patch)
            return write_report(runs, folder / "out" / name)

    return _write


@pytest.fixture(scope="module", params=["one", seldom("three"), seldom("begun")])
def report(request, reports) -> Path:
    return reports(request.param)


@pytest.fixture(scope="module", params=VIEWS, ids=str)
def view(request, browser, report):
    width, mode = request.param
    with browser.new_context(viewport={"width": width, "height": HIGH}, color_scheme=mode) as context:
        page = context.new_page()
        opened = View(page, width, mode, [], [])
        page.on("request", lambda request: opened.requested.append(request.url))
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.goto(report.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        # The whole page on the screen, so that all of it can be looked at.
        page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
        yield opened


def test_nothing_overflows(view):
    assert view.page.evaluate("document.documentElement.scrollWidth") <= view.width
    assert view.page.evaluate(OVERFLOWS) == []


def luminance(colour: str) -> float:
    """Return the relative luminance of an opaque colour, as WCAG 2.2 defines it."""
    values = [float(value) / 255 for value in re.fullmatch(r"rgb\((.*)\)", colour)[1].split(",")]
    parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(first: str, second: str) -> float:
    darker, lighter = sorted(map(luminance, (first, second)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.005)


def test_text_can_be_read_on_what_is_behind_it(view):
    texts = view.page.evaluate(TEXTS)
    has_bars = "begun" not in view.page.url
    expected = {"fashion-mnist-resnet8", *(("Where the time went", "time (s)") if has_bars else ())}
    assert expected <= {text for text, *_ in texts}
    too_faint = [text for text, colour, behind in texts if contrast(colour, behind) < LEAST_CONTRAST]
    assert too_faint == []
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 25, 29)"}[view.mode]
    assert len({behind for *_, behind in texts} - {paper}) >= 3 * has_bars  # on some of them stand numbers


def test_plots_stand_side_by_side_or_below_each_other(view):
    plots = view.page.evaluate(PLOTS)
    of_report = re.search(r"out/(\w+)/", view.page.url)[1]
    assert len({plot["title"] for plot in plots}) == len(plots) == {"one": 7, "three": 6, "begun": 0}[of_report]
    for above, below in pairwise(plots):
        assert above["sides"][3] < below["sides"][1], (above["title"], below["title"])
    with_halves = [plot for plot in plots if "epoch" in {text for text, *_ in plot["texts"]}]
    assert len(with_halves) == (0 if "begun" in view.page.url else 5)
    for plot in with_halves:
        (left, top, _, _), (other_left, other_top, _, _) = (
            next(sides for text, *sides in plot["texts"] if text.startswith(name)) for name in ("epoch", "time (")
        )
        if view.width == WIDE:
            assert other_left - left > WIDE / 3 and abs(other_top - top) < 5, plot["title"]
        else:
            assert other_top - top > 150 and abs(other_left - left) < 50, plot["title"]


def test_texts_of_plots_are_whole_and_apart_and_large_enough(view):
    for plot in view.page.evaluate(PLOTS):
        left, top, right, bottom = plot["sides"]
        for i, (text, *sides) in enumerate(plot["texts"]):
            assert left <= sides[0] and top <= sides[1] and sides[2] <= right and sides[3] <= bottom, text
            width, height = sides[2] - sides[0], sides[3] - sides[1]
            assert min(width, height) >= SMALLEST_TEXT or len(text) == 1, text
            for other, *its in plot["texts"][:i]:
                common = min(sides[2], its[2]) - max(sides[0], its[0]), min(sides[3], its[3]) - max(sides[1], its[1])
                # Corners may touch: a line is higher than its letters.
                assert min(common) < SMALLEST_TEXT / 3, (plot["title"], text, other)


def test_the_page_asks_for_nothing_and_complains_of_nothing(view, report):
    assert view.requested == [report.as_uri()] and view.complaints == []


def test_a_page_that_is_open_shows_what_has_happened_since(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.reporting.page.write_plots", lambda *_: [])
    run = write(tmp_path / "run", header(), epoch(1, 0.5))
    report = write_report([run], tmp_path / "out", refresh_s=1)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(report.as_uri())
        page.get_by_text("50.00").wait_for(timeout=1000 * limit_s())
        write_report([write(tmp_path / "run", header(), epoch(1, 0.5), epoch(2, 0.75))], tmp_path / "out", refresh_s=1)
        page.get_by_text("75.00").wait_for(timeout=1000 * limit_s())
