"""Tables that restate what the code says: the format's fields, exit codes, recipes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from datapipe.dataset.index import ENCODINGS, RECORD
from datapipe.dataset.manifest import FORMAT_VERSION, SEAL, Manifest
from datapipe.names import FORMATS, KINDS
from trainer.config import built_in
from trainer.config.recipe import load_recipe
from trainer.ranks.stop import SIGNALS, TEMPORARY_FAILURE, signal_of

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def names(cells: list[str]) -> list[str]:
    return re.findall(r"`(\w+)`", cells[0])


def test_fields_of_the_manifest() -> None:
    table = rows("format.md", "manifest.json")
    assert {name for cells in table for name in names(cells)} == {*Manifest.model_fields, SEAL}
    assert table[0][:2] == ["`version`", str(FORMAT_VERSION)]
    assert all(f"`{name}`" in table[2][2] for name in FORMATS)
    assert [cells[0] for cells in rows("format.md", "Versions and compatibility")][-1] == str(FORMAT_VERSION)


def test_fields_of_the_index() -> None:
    table = [(name, cells[1]) for cells in rows("format.md", "index.npy") for name in names(cells)]
    assert table == [(name, np.dtype(RECORD[name]).name) for name in RECORD.names]
    encodings = rows("format.md", "index.npy")[-1][2]
    assert re.findall(r"(\d) `([\w+]+)`", encodings) == [(str(n), name) for n, name in enumerate(ENCODINGS)]


def test_each_format_has_its_layout() -> None:
    page = (REFERENCE / "format.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"\n### {name}\n" not in page] == []
    kinds = re.findall(r"^- .*\*\*", (REFERENCE / "sources.md").read_text().partition("## Splits")[0], re.MULTILINE)
    assert len(kinds) == len(KINDS) - 1  # CIFAR's two kinds are one line


def test_each_exit_code_is_described() -> None:
    """Those of signals that stop a run, and that of a run whose time was over."""
    codes = {code for cells in rows("troubleshooting.md", "Exit codes") for code in re.findall(r"\d+", cells[0])}
    stopped = {128 + signal_of(name) for name in SIGNALS} | {TEMPORARY_FAILURE}
    assert codes == {str(code) for code in {0, 1, 2} | stopped}


def test_each_recipe_is_in_the_table() -> None:
    table = rows("built-in-recipes.md", "Those that are built in")
    assert sorted(re.findall("`(.+)`", cells[0])[0] for cells in table) == [*built_in()]
    for name, *_, measured in ([re.findall("`(.+)`", cells[0])[0], *cells[1:]] for cells in table):
        assert measured == "no" or "not run yet" not in load_recipe(name).source, name
