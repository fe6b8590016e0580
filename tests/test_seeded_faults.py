"""The table of seeded faults fits the product and the tests: tools/seeded_faults.py shows that these find those."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = tomllib.loads((ROOT / "tests" / "seeded_faults.toml").read_text())["fault"]
FEWEST, MOST_SLOW = 60, 10


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def parse(name: str) -> str:
    return ast.dump(ast.parse(read(name)))


def test_a_fault_changes_what_the_product_does():
    odd = [entry["breaks"] for entry in ENTRIES if read(entry["file"]).count(entry["old"]) != 1]
    assert odd == [], "what stands in the product is not there, or several times"
    same = [
        entry["breaks"]
        for entry in ENTRIES
        if ast.dump(ast.parse(read(entry["file"]).replace(entry["old"], entry["new"]))) == parse(entry["file"])
    ]
    assert same == [], "only a comment differs"


def test_the_test_that_finds_it_is_there():
    tests = {entry["test"]: entry["test"].partition("::") for entry in ENTRIES}
    missing = [test for test, (path, _, name) in tests.items() if name and f"def {name}(" not in read(path)]
    assert missing == [] and all((ROOT / path).exists() for path, _, _ in tests.values())


def test_there_are_enough_and_few_are_slow():
    assert len(ENTRIES) >= FEWEST
    assert all({"file", "old", "new", "breaks", "test"} == entry.keys() - {"slow"} for entry in ENTRIES)
    assert sum(entry.get("slow", False) for entry in ENTRIES) <= MOST_SLOW
    assert len({(entry["file"], entry["old"]) for entry in ENTRIES}) == len(ENTRIES)
    assert {entry["file"].partition("/")[0] for entry in ENTRIES} == {"datapipe", "trainer"}
