"""The site is built without a warning, and a link between its pages that leads nowhere is one."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NARROW = 400  # of a screen, in pixels
TOO_WIDE = """() => [document.documentElement, ...document.querySelectorAll("article table, .table-wrapper")]
    .filter(e => e.scrollWidth > Math.min(e.clientWidth, innerWidth) + 1)
    .map(e => `${e.tagName} ${e.scrollWidth} ${e.textContent.trim().slice(0, 40)}`)"""

pytest.importorskip("furo")
pytest.importorskip("myst_parser")


def build(source: Path, out: Path) -> subprocess.CompletedProcess:
    """Build the site with the options of tools/docs.sh."""
    script = (ROOT / "tools" / "docs.sh").read_text()
    options = script.partition("-m sphinx ")[2].partition(" docs docs/_build")[0].split()
    assert {"-W", "-n", "--keep-going"} <= set(options)
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(out / "doctrees"), str(source), str(out / "html")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", out)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_the_site_is_built(site: Path) -> None:
    for page in ("index", "tutorials/quickstart", "explanation/kfac", "reference/format", "reference/api"):
        assert (site / f"{page}.html").is_file()
    kfac = (site / "explanation" / "kfac.html").read_text()
    assert "<math" in kfac and "kfac-step-dark.svg" in (site / "explanation" / "kfac-in-figures.html").read_text()
    assert 'src="http' not in kfac and 'href="http://' not in kfac  # it loads nothing from elsewhere
    assert "open_loader" in (site / "reference" / "api.html").read_text()


@pytest.mark.slow
def test_no_page_is_wider_than_a_narrow_screen(site: Path) -> None:
    """No table hides a column, and each cell has its column's name before it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with sync_api.sync_playwright() as started:
        path = shutil.which("chromium") or started.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium is installed: apt install chromium, or playwright install chromium")
        page = started.chromium.launch(executable_path=path).new_page(viewport={"width": NARROW, "height": 900})
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri())
            assert page.evaluate(TOO_WIDE) == [], file.name
        page.goto((site / "reference" / "optimizers.html").as_uri())
        assert "90 %" in page.evaluate("getComputedStyle(document.querySelector('td + td'), '::before').content")


@pytest.mark.slow
def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser"]\nmyst_heading_anchors = 3\n')
    (source / "index.md").write_text("# Here\n\n[there](other.md#nothing)\n\n```{toctree}\nother\n```\n")
    (source / "other.md").write_text("# Other\n")
    done = build(source, tmp_path)
    assert done.returncode != 0 and "'nothing'" in done.stderr


def test_wrong_names_of_ours_are_not_passed_over() -> None:
    """What `-n` may pass over: other projects' names, and a few of ours."""
    ((_, pattern),) = runpy.run_path(str(ROOT / "docs" / "conf.py"))["nitpick_ignore_regex"]
    for name in ("datapipe.packing.Nothing", "datapipe.nothing", "trainer.nothing.at_all", "PackOption", "finished"):
        assert not re.fullmatch(pattern, name)
    assert re.fullmatch(pattern, "torch.Tensor")
