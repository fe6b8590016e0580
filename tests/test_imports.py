"""The import rules: which part may import which; no circles; heavy packages only where they are used."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import clean_environment

ROOT = Path(__file__).parents[1]
# Each part (a folder, or a file at a package's root) and the parts it may import, by level: arrows point down. In
# brackets: only inside a function, when it is called. "datapipe" stands for the whole ground floor of it.
GROUND = {"errors", "fsio", "names", "memory", "public_data", "cluster", "console", "watched", "checks"}
GROUND |= {"splits", "split_names", "split_variants", "clock", "process_id", "foreign", "locks"}
DATAPIPE = {
    # 0: the ground floor, which every part above may import
    "errors": "",
    "foreign": "errors",
    "fsio": "foreign",
    "names": "",
    "public_data": "",
    "memory": "errors",
    "cluster": "errors",
    "console": "errors",
    "clock": "",
    "watched": "clock errors",
    "process_id": "fsio",
    "locks": "clock errors foreign fsio",
    "checks": "errors",
    "split_names": "console",
    "split_variants": "split_names",
    "splits": "console errors split_names split_variants",
    # 1
    "native": "",
    "images": "native",
    "sampling": "",
    # 2
    "formats": "images",
    "dataset": "images",
    # 3
    "sources": "images dataset formats.magic formats.naming formats.tar_listing",
    "jobgroup": "",
    "staging": "dataset jobgroup sampling",
    # 4
    "packing": "sources formats images native dataset sampling",
    "loaders": "dataset images jobgroup native sampling formats.naming formats.tar_listing (staging)",
    # 5
    "fetch": "",
    "bench": "loaders dataset sampling",
    "stage_costs": "dataset jobgroup",
    "doctor": "dataset (images) (loaders) (stage_costs)",
    "cli": "(bench) (dataset) (doctor) (fetch) (images) (packing) (staging)",
    "__main__": "cli",
    "__init__": "(dataset) (errors) (images) (loaders) (packing) (sampling) (staging)",
}
TRAINER = {
    # 0
    "errors": "datapipe",
    "kfac": "",
    "models": "datapipe",
    "reporting": "datapipe",
    # 1
    "optim": "kfac datapipe",
    # 2
    "step": "optim datapipe datapipe.loaders",
    # 3
    "config": "models optim step datapipe datapipe.dataset",
    # 4
    "ranks": "config errors reporting datapipe datapipe.jobgroup datapipe.loaders",
    # 5
    "checkpoints": "errors ranks reporting datapipe",
    # 6
    "run": "checkpoints config errors kfac models optim ranks reporting step datapipe datapipe.dataset "
    "datapipe.jobgroup datapipe.loaders datapipe.sampling datapipe.staging",
    # 7
    "launching": "config ranks reporting datapipe",
    "measuring": "config reporting datapipe datapipe.dataset",
    "cli": "datapipe (config) (errors) (launching) (measuring) (ranks) (reporting) (run)",
    "__main__": "cli",
    "__init__": "",
}
# Optional or heavy packages, and the only files that may import them.
PACKAGES = {
    "torch": ["datapipe/jobgroup/", "datapipe/loaders/", "datapipe/staging/exchange.py", "trainer/"],
    "h5py": ["datapipe/formats/hdf5.py"],
    "lmdb": ["datapipe/formats/lmdb.py"],
    "crc32c": ["datapipe/formats/tfrecord.py"],
    "tfrecord": ["datapipe/formats/tfrecord.py"],
    "pyarrow": [f"datapipe/sources/parquet{part}.py" for part in ("", "_files")],
    "scipy": ["datapipe/sources/imagenet_labels.py"],
    "webdataset": ["datapipe/loaders/tar_streams.py"],
    "braceexpand": ["datapipe/loaders/webdataset.py"],
    "nvidia": ["datapipe/loaders/dali.py"],
    "mpi4py": ["datapipe/jobgroup/mpi.py"],
    "simplejpeg": ["datapipe/images/codec.py"],
    "PIL": ["datapipe/images/codec.py"],
    "matplotlib": ["trainer/reporting/", "trainer/measuring/scaling.py"],
    "pytorch_optimizer": [f"trainer/optim/{name}.py" for name in ("lamb", "lars", "muon", "soap")],
}
AT_TOP = {"torch", "simplejpeg", "PIL"}  # those that may be imported when a file is loaded, not only when it is used
# What pyproject.toml calls a package, where it is not the package's own name. pydantic pins pydantic_core.
DISTRIBUTIONS = {"PIL": "pillow", "nvidia": "nvidia-dali-cuda130", "pydantic_core": "pydantic"}
# Lines of a file: beyond 300 a type or a room is often missing. These are longer, with the length each may have; the
# table only shrinks.
LONGEST = 300


class Import(NamedTuple):
    """One import of a file."""

    module: str  # the module or package that is imported, by its whole name
    is_late: bool  # inside a function, or for the type checker alone


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(path for name in ("datapipe", "trainer") for path in (ROOT / name).rglob("*.py"))
MODULES = {module_name(path) for path in FILES}


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return what a file imports, submodules by their own names, wherever in the file it stands."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()

    def visit(node: ast.AST, is_late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, is_late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*above, *filter(None, [child.module])])
                for alias in child.names:
                    submodule = f"{origin}.{alias.name}"
                    yield Import(submodule if submodule in MODULES else origin, is_late)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, is_late or is_function or is_for_types)

    return tuple(visit(ast.parse(path.read_text()), False))


def part(module: str) -> str:
    """Return the part of its package that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def is_allowed(importer: str, imported: Import) -> bool:
    package, target = importer.split(".")[0], imported.module
    if target == package or f"{target}.".startswith(f"{package}.{part(importer)}."):
        return True  # the version, or a neighbour in the same part
    table = DATAPIPE if package == "datapipe" else TRAINER
    arrows = table[part(importer)].split()
    ground = [f"datapipe.{name}" for name in GROUND]
    if package == "trainer":
        target = target.removeprefix("trainer.")
        arrows += ground if "datapipe" in arrows else []
    else:
        target = target.removeprefix("datapipe.")
        arrows += [] if part(importer) in GROUND else GROUND
    if imported.is_late:
        arrows = [arrow.strip("()") for arrow in arrows]
    return target in arrows or any(target.startswith(f"{arrow}.") for arrow in arrows if arrow != "datapipe")


def wrong_arrows() -> set[str]:
    return {
        f"{module_name(path)} → {imported.module}"
        for path in FILES
        for imported in imports(path)
        if imported.module in MODULES and not is_allowed(module_name(path), imported)
    }


def circle() -> list[str]:
    """Return the modules of a circle of imports; none if there is none."""
    graph = {module_name(path): {imported.module for imported in imports(path)} & MODULES for path in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_arrows_between_parts_point_down():
    assert wrong_arrows() == set()


def test_no_module_imports_itself_by_way_of_others():
    assert circle() == []


@pytest.mark.parametrize(
    ("importer", "module", "expected"),
    [
        ("datapipe.images.codec", "datapipe.sampling.order", ""),
        ("datapipe.images.codec", "datapipe.errors", "at once"),
        ("datapipe.errors", "datapipe.fsio", ""),
        ("datapipe.sources.csv", "datapipe.formats.naming", "at once"),
        ("datapipe.sources.csv", "datapipe.formats.tar", ""),
        ("datapipe.loaders", "datapipe.staging", "late"),
        ("trainer.kfac.solvers", "datapipe.errors", ""),
        ("trainer.reporting.page", "datapipe.fsio", "at once"),
        ("trainer.reporting.page", "datapipe.loaders", ""),
        ("trainer.cli", "trainer.run.run", "late"),
        ("trainer.run.state", "trainer.config.recipe", "at once"),
    ],
)
def test_what_the_table_allows(importer, module, expected):
    answers = [is_allowed(importer, Import(module, is_late)) for is_late in (False, True)]
    assert answers == {"": [False, False], "late": [False, True], "at once": [True, True]}[expected]


def test_each_part_has_its_row():
    parts = {
        package: {part(name) for name in MODULES if name.split(".")[0] == package}
        for package in ("datapipe", "trainer")
    }
    assert parts == {"datapipe": set(DATAPIPE), "trainer": set(TRAINER)}


def test_the_table_itself_points_down():
    for table in (DATAPIPE, TRAINER):
        rows = list(table)
        for name, arrows in table.items():
            for arrow in arrows.replace("(", "").replace(")", "").split():
                target = arrow.split(".")[0]
                assert target == "datapipe" or rows.index(target) < rows.index(name), (name, arrow)


def misplaced_imports(path: Path) -> Iterator[str]:
    """Yield what a file must not import, or only when it is used."""
    name = path.relative_to(ROOT).as_posix()
    for imported in imports(path):
        package = imported.module.split(".")[0]
        if name.startswith("datapipe/") and package == "trainer":
            yield f"{name} imports trainer"
        is_foreign = imported.module not in MODULES and package not in {"torch", *sys.stdlib_module_names}
        if name.startswith("trainer/kfac/") and is_foreign:
            yield f"{name} imports {package}"
        if package in PACKAGES:
            if not name.startswith(tuple(PACKAGES[package])):
                yield f"{name} imports {package}"
            if not imported.is_late and package not in AT_TOP:
                yield f"{name} imports {package} when loaded, not when used"


def test_packages_are_imported_where_they_are_used():
    assert [line for path in FILES for line in misplaced_imports(path)] == []


def distribution_names(requirements: list[str]) -> set[str]:
    """Return what is required, in lower case and with hyphens."""
    return {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in requirements}


def test_imported_packages_are_declared():
    """What another package happens to bring may be gone with its next release. Extras are imported late."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = distribution_names(project["dependencies"])
    extras = {name: distribution_names(lines) for name, lines in project["optional-dependencies"].items()}
    development = extras.pop("dev")
    assert set().union(*extras.values()) <= development | {"nvidia-dali-cuda120"}  # the other of the two that exist
    undeclared = set()
    for path in FILES:
        for imported in imports(path):
            package = imported.module.split(".")[0]
            name = DISTRIBUTIONS.get(package, package.lower().replace("_", "-"))
            allowed = always.union(*extras.values()) if imported.is_late else always
            if package not in {"datapipe", "trainer", *sys.stdlib_module_names} and name not in allowed:
                undeclared.add(f"{module_name(path)} → {package}")
    assert undeclared == set()


def test_no_file_is_long():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


COMMANDS = {
    "datapipe": ["--help"],
    "datapipe pack": ["{sample}", "{out}", "--workers", "1"],
    "datapipe stage": ["{packed}", "{out}"],
    "trainer": ["--help"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_need_no_torch_do_not_load_it(command, sample_dir, packed_folders, tmp_path):
    """It takes seconds. Only an exchange between nodes, loaders and trainings need it."""
    places = {"sample": sample_dir, "packed": packed_folders["tar"] / "val", "out": tmp_path / "out"}
    words = [*command.split(), *(word.format(**places) for word in COMMANDS[command])]
    program = [sys.executable, ROOT / "tests" / "children" / "tells_what_is_loaded.py", "torch,typer", *words]
    done = subprocess.run(program, env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == "typer\n", done.stderr
    assert (tmp_path / "out").exists() is (command not in ("datapipe", "trainer")), done.stderr
