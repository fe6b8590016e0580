"""The table of seeded faults fits the product and the tests: tools/seeded_faults.py shows that these find those."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRIES = tomllib.loads((ROOT / "tests" / "seeded_faults.toml").read_text())["fault"]
FEWEST, MOST_SLOW = 60, 10


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["breaks"])
def test_a_fault_changes_what_the_product_does(entry):
    text = (ROOT / entry["file"]).read_text()
    assert text.count(entry["old"]) == 1
    changed = text.replace(entry["old"], entry["new"])
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), "only a comment differs"


@pytest.mark.parametrize("test", sorted({entry["test"] for entry in ENTRIES}))
def test_the_test_that_finds_it_is_there(test):
    path, _, function = test.partition("::")
    assert not function or f"def {function}(" in (ROOT / path).read_text()


def test_there_are_enough_and_few_are_slow():
    assert len(ENTRIES) >= FEWEST
    assert sum(entry.get("slow", False) for entry in ENTRIES) <= MOST_SLOW
    assert len({(entry["file"], entry["old"]) for entry in ENTRIES}) == len(ENTRIES)
    assert {entry["file"].partition("/")[0] for entry in ENTRIES} == {"datapipe", "trainer"}
