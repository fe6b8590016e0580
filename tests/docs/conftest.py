"""The pages that tests read: the README, its neighbours, and the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))]
    + [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("datapipe", "trainer")


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def command_lines(page: Path) -> Iterator[list[str]]:
    """Iterate over the `datapipe` and `trainer` commands in the shell blocks of a page, as lists of words.

    What starts a command (srun, torchrun, a script of tools/) is taken away.
    """
    for block in code_blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            script = next((i for i, word in enumerate(words) if re.search(r"tools/\w+/pack[\w.-]*$", word)), None)
            if script is not None:
                yield ["datapipe", "pack", *words[script + 1 :]]
                continue
            starts = [words.index(program) for program in PROGRAMS if program in words]
            if starts:
                yield [word for word in words[min(starts) :] if not word.startswith(">")]  # into a file


# A test that takes one of these runs once for each such page.
PARAMETERS = {
    "page": PAGES,
    "page_with_python": [page for page in PAGES if code_blocks(page, "python") and page.name != "CONTRIBUTING.md"],
    "page_with_toml": [page for page in PAGES if code_blocks(page, "toml") and page.name != "CONTRIBUTING.md"],
    "page_with_commands": [page for page in PAGES if any(command_lines(page))],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in PARAMETERS.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, PARAMETERS[name], ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="session")
def blocks() -> Callable[[Path, str], list[str]]:
    return code_blocks


@pytest.fixture(scope="session")
def commands() -> Callable[[Path], Iterator[list[str]]]:
    return command_lines
