"""What is made from the code or from records is what is committed."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import drawing, figures, tables
from benchmarks.bench_sharedfs import LOCAL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate():
    """The script docs/generate.py, as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


def test_reference_pages_are_those_of_the_code(generate) -> None:
    for name, text in generate.pages().items():
        committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"docs/reference/{name} is stale: run `python docs/generate.py`"


def test_every_command_and_setting_is_in_the_reference(generate) -> None:
    commands, recipe = generate.pages()["cli.md"], generate.pages()["recipe.md"]
    for heading in ("datapipe pack", "datapipe stage", "trainer train", "trainer report"):
        assert f"### {heading}\n" in commands
    assert "`--max-bad N\\|P%`" in commands and "`--set section.key=value`" in commands
    assert " | number > 0; or pairs of an epoch and such a value | `0.00015` |\n" in recipe
    assert re.search(r"^\| `train.epochs` \| [^|]+ \| whole number ≥ 1 \| required \|$", recipe, re.MULTILINE)


def test_the_record_of_encoders_becomes_a_table() -> None:
    row = {"cpu_s": {"median": 0.25, "min": 0.2, "max": 0.5}, "process_peak_bytes": {"median": 64e6}, "times_cpu": 2.5}
    record = {
        "environment": {"cpu": "some processor"},
        "settings": {"rounds": 5, "sizes": {"small": [20_000, 600]}},
        "results": {"tar, small": {"ours": row | {"times_cpu": 1.0}, "tarfile": row}},
    }
    table = "\n".join(tables.encoders(record))
    assert "| tar, small | tarfile | 0.250 (0.200–0.500) | 2.50 | 64 |" in table
    assert "5 runs" in table and "20,000 images of 600 bytes" in table


def test_figures_are_of_the_committed_records() -> None:
    committed = {path.stem: data(path.read_text(encoding="utf-8")) for path in (ROOT / "docs" / "figures").iterdir()}
    checksums = {name: drawing.checksum(plan()) for name, plan in figures.FIGURES.items()}
    assert committed == {f"{name}-{theme}": checksums[name] for name in checksums for theme in drawing.THEMES}, (
        "a figure is older than its record: run `python -m benchmarks.figures`"
    )


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path)])
    assert figures.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "docs" / "figures").iterdir()}


def test_a_figure_knows_its_data() -> None:
    """Another value in a record gives another checksum, and the values stand in the picture."""
    plot = figures.pack()
    bars = plot.panels[0].bars
    assert (bars[0].name, bars[1].is_ours, bars[1].low <= bars[1].value <= bars[1].high) == ("tar cf", True, True)
    value = figures.record("pack")["sections"]["copy"]["packers"]["datapipe, tar"]["mb_per_s"]["median"]
    changed = json.loads(json.dumps(figures.record("pack")).replace(repr(value), repr(math.nextafter(value, 0))))
    assert changed != figures.record("pack")
    before = drawing.checksum(plot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "record", lambda _: changed)
        assert drawing.checksum(figures.pack()) != before
    assert f">{value:,.0f}<" in drawing.draw(plot, "dark")


def data(svg: str) -> str:
    return re.search(r"<!-- data: ([0-9a-f]{16}) -->", svg)[1]


def test_the_five_figures_of_the_readme() -> None:
    """They are what the records say."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = figures.record("loader")["sections"]
    photographs, pixels = (sections[name]["loaders"] for name in ("photographs", "pixels"))
    ours, ffcv, webdataset = (
        photographs[name]["images_per_cpu_s"]["median"]
        for name in ("datapipe, tar", "FFCV, jpg", "WebDataset + Pillow")
    )
    assert (
        f"| {ours:.0f}: {ours / ffcv:.1f} × FFCV's JPEG mode, {ours / webdataset:.1f} × WebDataset + Pillow; " in readme
    )
    ours, ffcv = (its["images_per_cpu_s"]["median"] for its in pixels.values())
    assert f" {ours:,.0f}: {ours / ffcv:.1f} × FFCV's |" in readme
    cases = figures.record("throughput")["cases"]
    small, large = (cases[name]["ratios"]["reference loop"]["median"] for name in ("resnet8", "resnet50"))
    assert f"| {small:.2f} × with ResNet-8, {large:.2f} × with ResNet-50 at 96 pixels |" in readme
    packers = figures.record("pack")["sections"]["copy"]["packers"]
    ours, tar, peer = (packers[name]["mb_per_s"]["median"] for name in ("datapipe, tar", "tar cf", "WebDataset"))
    assert f"| {ours:,.0f} MB/s: {ours / tar:.2f} × `tar cf`, {ours / peer:.1f} × WebDataset's writer |" in readme
    added = {name: its["added"] for name, its in figures.record("kfac-resnet32")["found"].items()}
    assert f"| {added['K-FAC, cholesky']:.1%}".replace("%", " %") in readme
    assert f"{added['K-FAC as published']:.1%}".replace("%", " %") in readme
    reached = {name: its["targets"]["0.91"] for name, its in figures.record("optimizers-resnet8-4096")["found"].items()}
    kfac, soap, muon, lamb = (reached[name]["step"]["mean"] for name in ("K-FAC", "SOAP", "Muon", "LAMB"))
    assert f"| K-FAC {kfac:.0f}; SOAP {soap:.0f}, Muon {muon:.0f}; LAMB {lamb:.0f} (4 of 5 seeds) |" in readme
    assert reached["LAMB"]["reached"] == 4


def test_the_table_of_the_readme() -> None:
    """From a slow filesystem to training: it is what the record says."""
    readme, result = (ROOT / "README.md").read_text(encoding="utf-8"), figures.record("sharedfs")

    def seconds(*keys: str) -> str:
        return f"{statistics.median(sum(run[key] for key in keys) for run in runs):.1f}"

    for name, its in result["ways"].items():
        runs = its["runs"]
        calls, read = (
            its[f"stage_{key}"]["median"] + its[f"epoch_1_{key}"]["median"] for key in ("metadata_calls", "read_bytes")
        )
        cells = [seconds("stage_s", "epoch_1_first_batch_s"), seconds("stage_s", "epoch_1_wall_s"), seconds("later_s")]
        row = " | ".join([name, *cells, f"{calls:,.0f}", f"{read / 1e6:,.0f}"])
        assert name == LOCAL or f"| {row} |" in readme, row
    assert f"{result['floors']['decoder_later_s']:.1f} s" in readme
