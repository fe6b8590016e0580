"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path.relative_to(ROOT) for name in ("datapipe", "trainer") for path in sorted((ROOT / name).rglob("*.py"))]
MODULES = [".".join(path.with_suffix("").parts) for path in FILES if ">>> " in (ROOT / path).read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
