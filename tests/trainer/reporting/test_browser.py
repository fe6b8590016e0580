"""The report in a browser: nothing is cut off, unreadable or fetched from elsewhere, wide or narrow, light or dark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainer.reporting.page import write_report
from trainer.reporting.svg import DARK, LIGHT

from .test_report import TIME_S, end, epoch, header, train, write

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
LEAST_CONTRAST = 4.5  # WCAG 2.2, section 1.4.3
# The text elements that are seen, with their colour and that of what is under their middle.
TEXTS = """() => {
    const texts = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
        element.scrollIntoView({block: "center", inline: "center"});
        const box = element.getBoundingClientRect();
        const under = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        const isInSvg = element.closest("svg") !== null;
        const bar = isInSvg && under.find(other => other.tagName === "path" && getComputedStyle(other).fill !== "none");
        const style = getComputedStyle(element);
        texts.push([walker.currentNode.data.trim(), isInSvg ? style.fill : style.color,
                    bar ? getComputedStyle(bar).fill : getComputedStyle(document.body).backgroundColor]);
    }
    return texts;
}"""
PLOTS = """() => [...document.querySelectorAll("svg")].filter(svg => svg.checkVisibility()).map(svg => {
    const {left, right, width, height} = svg.getBoundingClientRect();
    return {label: svg.getAttribute("aria-label"), left, right, width, height};
})"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {', '.join(NAMES)}")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[Path]:
    """The report of a run with everything that it can show, and that of three runs."""
    folder = tmp_path_factory.mktemp("browser")
    times = {"staging": 3.0, "start": 2.0, "compile": 5.0} | TIME_S
    rank = {"wait_share": 0.3, "memory_bytes": 2**30, "time_s": times}
    ranks = [rank | {"rank": number, "host": f"a-node-with-a-long-name-{number}"} for number in range(8)]
    lines = [header(world_size=8, hardware={"cpu": "Some Model 5000", "memory_bytes": 2**34})]
    for step in range(10, 301, 10):
        cosines = {"conv1": 0.5 + step / 1000}
        lines += [
            train(step, 2 - step / 200),
            {"event": "kfac", "step": step, "elapsed_s": step / 10, "cosines": cosines},
        ]
        lines += [epoch(step // 100, 0.8 + step / 3000)] if step % 100 == 0 else []
    runs = [write(folder / name, *lines, end(ranks=ranks, time_s=times)) for name in ("one", "two", "a-third-one" * 4)]
    return [write_report(runs[:1], folder / "single"), write_report(runs, folder / "several")]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])  # a container's root
        yield started
        started.close()


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("number", [0, 1], ids=["single", "several"])
def test_a_report_in_a_browser(browser, reports, number, scheme, width):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(reports[number].as_uri())
    assert asked == [reports[number].as_uri()] and said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plots = page.evaluate(PLOTS)
    assert len({plot["label"] for plot in plots}) == len(plots) == (7 if number == 0 else 6)
    assert all(0 <= plot["left"] < plot["right"] <= width for plot in plots)
    below_each_other = {plot["label"]: plot["height"] > plot["width"] for plot in plots}
    assert below_each_other["Accuracy"] == below_each_other["K-FAC"] == (width == 400)
    colours = LIGHT if scheme == "light" else DARK
    texts = page.evaluate(TEXTS)
    assert {under for _, _, under in texts} >= {"rgb({}, {}, {})".format(*_rgb(colours["paper"]))}
    assert len(texts) > 150
    poor = {(text, colour, under) for text, colour, under in texts if _contrast(colour, under) < LEAST_CONTRAST}
    assert not poor
    page.close()


def _rgb(colour: str) -> tuple[int, ...]:
    if colour.startswith("#"):
        return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.2, from 1 to 21."""
    lighter, darker = sorted((_luminance(_rgb(colour)) for colour in (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(rgb: tuple[int, ...]) -> float:
    parts = [value / 255 for value in rgb]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
