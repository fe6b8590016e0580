"""How the code speaks, as far as that can be counted: names, parameters and results that nobody describes, phrases."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITTEN = ("datapipe", "trainer", "benchmarks", "tools", "docs")


def files_in(*names: str) -> Iterator[Path]:
    """Walk some folders; what is made in them is not entered: it may be a million images."""
    for name in names:
        for folder, folders, files in os.walk(ROOT / name):
            folders[:] = {*folders} - {"work", "_build", "results"}
            yield from (Path(folder, file) for file in files)


FILES = sorted(path for path in files_in(*WRITTEN) if path.suffix == ".py")
# Prepositions, numbers and participles: they say nothing of the thing.
NO_NAMES = {"of", "found", "one", "wanted", "taken", "held", "told"}
# What a reader abroad reads twice, and where it may stand.
PHRASES = re.compile(
    r"\b(?:(?:go|goes|going|went|gone) on\b|anew\b|but for\b|(?<!there )is no\b(?! (?:longer|more)\b))", re.IGNORECASE
)
TEXTS = sorted(
    path
    for path in files_in(*WRITTEN, "tests")
    if path.suffix in {".py", ".md", ".sh", ".pbs", ".sbatch", ".toml", ".jinja", ".html"} and path != Path(__file__)
)
# With these words, a description of a parameter would not stand alone.
DEPENDENT_WORDS = {"of", "that", "what", "which", "how", "as", "on", "where"}
MANY = 2  # parameters; a function with more describes each, and what it returns
# Functions that many files have are described once, where the interface is: the file's folder or the file, the name.
INTERFACES = {
    ("datapipe/formats", "add"): "datapipe/formats/__init__.py",
    ("datapipe/sources", "load"): "datapipe/sources/__init__.py",
    ("datapipe/loaders", "batches"): "datapipe/loaders/engine.py",
    ("datapipe/loaders", "make_loader"): "datapipe/loaders/__init__.py",
    ("datapipe/loaders", "images"): "datapipe/loaders/engine.py",
}
COMMANDS = {
    "datapipe/cli/cache.py",
    "datapipe/cli/__init__.py",
    "datapipe/cli/measure.py",
    "datapipe/cli/pack.py",
    "datapipe/cli/stage.py",
    "trainer/cli/__init__.py",
    "trainer/cli/results.py",
}  # whose parameters are described by --help


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of whatever gets a name: variables, attributes, parameters, functions, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=other):
                yield node.lineno, other or name


def public_functions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a module and the methods of its classes, those with a leading underscore left out.

    A method of the same name in a base class of the same module is where the method is described.
    """
    classes = {child.name: child for child in node.body if isinstance(child, ast.ClassDef)}
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            bases = [classes[base.id] for base in child.bases if isinstance(base, ast.Name) and base.id in classes]
            described = {method.name for base in bases for method in public_functions(base)}
            yield from (method for method in public_functions(child) if method.name not in described)


def num_parameters(function: ast.FunctionDef) -> int:
    parameters = function.args
    all_of_them = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    return sum(parameter.arg not in ("self", "cls") for parameter in all_of_them)


def bad_names(path: Path) -> list[str]:
    return [f"{path}:{line} {name}" for line, name in bound_names(parsed(path)) if name.lstrip("_") in NO_NAMES]


def describes_parameters(function: ast.FunctionDef) -> bool:
    return "Args:" in (ast.get_docstring(function) or "")


def describes_result(function: ast.FunctionDef) -> bool:
    """Return whether a section does, or the first line: "Return …", "Count …", "…, and yield …"; or there is none."""
    if function.returns is None or ast.unparse(function.returns) in ("None", "NoReturn"):
        return True
    docstring = ast.get_docstring(function) or ""
    section = re.search(r"^(Returns|Yields):$", docstring, re.MULTILINE)
    return bool(section or re.match(r"(Count|List) |.*\b(return|yield)\b", docstring, re.IGNORECASE))


def undescribed(path: Path, is_described: Callable[[ast.FunctionDef], bool]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    if name in COMMANDS:
        return []
    return [
        f"{path}:{function.lineno} {function.name}"
        for function in public_functions(parsed(path))
        if num_parameters(function) > MANY
        and not is_described(function)
        and INTERFACES.get((folder(path), function.name), name) == name
    ]


def dependent_descriptions(tree: ast.AST) -> Iterator[str]:
    """Yield the name and the text of those under Args and Attributes that do not stand alone, or begin in lower case.

    The text is that of the first line.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        docstring = (ast.get_docstring(node) if isinstance(node, documented) else None) or ""
        for section in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*(?:\n|\Z)|\n)+)", docstring, re.MULTILINE):
            for name, text in re.findall(r"^ {4}(\S[^:\n]*):[ \n]*(.*)$", section, re.MULTILINE):
                first = re.sub(r"\W+$", "", text.split()[0]) if text else ""
                if not first or text[0].islower() or first.lower() in DEPENDENT_WORDS:
                    yield f"{name}: {text}"


def folder(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def test_names_are_names():
    assert [line for path in FILES for line in bad_names(path)] == []


@pytest.mark.parametrize("is_described", [describes_parameters, describes_result])
def test_parameters_and_results_are_described(is_described):
    files = [path for path in FILES if folder(path).startswith(("datapipe", "trainer"))]
    assert [line for path in files for line in undescribed(path, is_described)] == []


def test_descriptions_of_parameters_stand_alone():
    files = [path for path in FILES if folder(path).startswith(("datapipe", "trainer"))]
    assert len(files) > 200
    offences = [f"{path.relative_to(ROOT)}: {text}" for path in files for text in dependent_descriptions(parsed(path))]
    assert not offences


def test_what_does_not_stand_alone():
    program = '''
class K:
    """A thing.

    Attributes:
        size: Size in bytes.
        kind: which of them.
    """

    def f(self, a, b, c, d):
        """Do it.

        Args:
            a: Of each file,
                where: that is a line that continues.
            b: number of files.
            c: Text, as on other lines.
            d: As, in d.

        Returns:
            of no interest: what a result is.
        """
'''
    offences = list(dependent_descriptions(ast.parse(program)))
    assert offences == ["kind: which of them.", "a: Of each file,", "b: number of files.", "d: As, in d."]


def test_sentences_are_plain():
    texts = {path: " ".join(re.sub(r"\n\s*#", "\n", path.read_text()).split()) for path in [ROOT / "README.md", *TEXTS]}
    assert len(texts) > 200
    found = [f"{path.relative_to(ROOT)}: {text[max(0, hit.start() - 30) : hit.end() + 30]}"
             for path, text in texts.items() for hit in PHRASES.finditer(text)]  # fmt: skip
    assert not found


def test_what_is_not_plain():
    text = "It goes on. Begun anew, but for this. Going  on? That is no name; there is no other. It is no longer here."
    assert PHRASES.findall(" ".join(text.split())) == ["goes on", "anew", "but for", "Going on", "is no"]


def test_what_counts_as_a_name():
    program = """
import os as of
def told(wanted, *, found=1): held = lambda one: one
class taken: one = 1
for self.one in (1, 2): pass
with open(x) as told: pass
found: int = 2
use(of, held)
"""
    assert sorted(name for _, name in bound_names(ast.parse(program)) if name in NO_NAMES) == sorted(
        ["of", "told", "wanted", "found", "held", "one", "taken", "one", "one", "told", "found"]
    )


def test_what_counts_as_many():
    program = """
def f(a, b, *c, **d): ...
def g(a, b, *, c): ...
def _h(a, b, c): ...
class K:
    def m(self, a, b): ...
    def n(self, a, b, c): ...
class _L:
    def m(self, a, b, c): ...
class M(K):
    def n(self, a, b, c): ...
    def o(self, a, b, c): ...
"""
    functions = public_functions(ast.parse(program))
    assert [function.name for function in functions if num_parameters(function) > MANY] == ["g", "n", "o"]


def test_what_describes_a_result():
    program = '''
def a() -> int: """Return it."""
def b() -> int: """Train to the end; return how it ended."""
def c() -> int:
    """Make it.

    Returns:
        It.
    """
def d() -> None: """Make it."""
def e() -> NoReturn: """Raise it."""
def f() -> int: """Make it."""
def g() -> int:
    """Make it.

    Return it.
    """
def h() -> int: ...
'''
    functions = public_functions(ast.parse(program))
    assert [function.name for function in functions if not describes_result(function)] == ["f", "g", "h"]
