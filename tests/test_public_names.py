"""What the packages offer: names that exist, are described, and load no more than they need."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import datapipe

PUBLIC = (
    "datapipe",
    "datapipe.dataset",
    "datapipe.formats",
    "datapipe.loaders",
    "datapipe.packing",
    "datapipe.staging",
    "trainer.kfac",
    "trainer.models",
    "trainer.optim",
)
NAMES = [(module, name) for module in PUBLIC for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda value: value)
def test_each_public_name_exists_and_is_described(module, name):
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_the_reference_has_each_public_name():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "api.md").read_text()
    directive = r"^\.\. (?:auto)?(module|function|class|data):: ([\w.]+)(?:\(.*)?$"
    described = []
    for kind, place in re.findall(directive, page, re.MULTILINE):
        module, _, name = (place, "", "") if kind == "module" else place.rpartition(".")
        content = vars(importlib.import_module(module))
        described += content.values() if kind == "module" else [content[name]]
    known = {id(value) for value in described}
    public = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in NAMES}
    assert [place for place, value in public.items() if id(value) not in known] == ["datapipe.__version__"]


@pytest.mark.parametrize("module", PUBLIC)
def test_what_a_public_module_defines_is_offered_or_private(module):
    offered = importlib.import_module(module)
    defined = {
        name
        for name, value in vars(offered).items()
        if getattr(value, "__module__", None) == module and not name.startswith("_")
    }
    assert defined <= set(offered.__all__)
    assert len(offered.__all__) == len(set(offered.__all__))


def test_type_checkers_see_the_names_that_are_loaded_late():
    tree = ast.parse(Path(datapipe.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == datapipe._HOMES
    assert set(datapipe.__all__) <= set(dir(datapipe))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'datapipe' has no attribute 'nothing'"):
        datapipe.nothing  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize(
    ("statement", "unloaded"),
    [
        ("import datapipe", "numpy pydantic torch typer"),
        ("import datapipe.cli", "numpy torch"),
        (
            "import datapipe.fetch; from datapipe import PackOptions, RecodeOptions, convert, pack, stage, verify",
            "torch",
        ),
    ],
)
def test_nothing_is_loaded_too_early(statement, unloaded):
    program = f"import sys\n{statement}\nprint(sorted(set({unloaded.split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
