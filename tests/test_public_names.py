"""What the packages offer: names that exist, are described, and load no more than they need."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import datapipe

ROOT = Path(__file__).parents[1]
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
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
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


# What modules side by side all have, because each is one kind of the same thing.
CONTRACTS = {
    "datapipe/formats": {"SUFFIX", "OVERHEAD_BYTES", "Writer", "read"},
    "datapipe/sources": {"detect", "load"},
    "datapipe/loaders": {"make_loader"},
    "trainer/optim": {"Settings", "build"},
}


def _names_at_top(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("package", ["datapipe", "trainer"])
def test_a_name_stands_in_one_module(package):
    """A constant in one module of its room; a function or a class in one of the package, commands of cli excepted."""
    in_rooms, in_package = defaultdict(list), defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        room = str(path.parent.relative_to(ROOT))
        for name in {*_names_at_top(path)} - CONTRACTS.get(room, set()) - {"logger"}:
            if not name.startswith("_"):
                in_rooms[room, name].append(path.name)
                if not name.isupper() and path.parent.name != "cli":
                    in_package[name].append(str(path.relative_to(ROOT)))
    assert {key: files for key, files in in_rooms.items() if len(files) > 1} == {}
    assert {name: files for name, files in in_package.items() if len(files) > 1} == {}
