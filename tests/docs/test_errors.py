"""Every error has a line on what to do about it."""

from __future__ import annotations

import inspect
from pathlib import Path

import datapipe.errors
import trainer.errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "troubleshooting.md"


def test_every_error_is_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    modules = (datapipe.errors, trainer.errors)
    errors = [
        name
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == module.__name__
    ]
    assert len(errors) >= 13
    assert [name for name in errors if f"| `{name}` |" not in page] == []
