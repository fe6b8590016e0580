"""tools/setup.sh, with a Python that only writes down what it was asked to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As `python3` it makes a "virtual environment": itself once more. Asked to run pip, it notes the arguments.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-c "*version_info*) echo True ;;
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip") shift 2; echo "$@" >>"$NOTES" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """setup(…, URL) -> the calls of pip that a set-up has made, by what follows the constraints."""
    top = tmp_path / "checkout"
    for name in ("tools", "datapipe/native"):
        (top / name).mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "tools/setup.sh", "tools/constraints.txt", "datapipe/native/native.h"):
        shutil.copy(ROOT / name, top / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(PYTHON)
    (tmp_path / "bin/python3").chmod(0o755)
    notes = tmp_path / "notes"
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(notes)}

    def _setup(*words: str, **changes: str) -> list[str]:
        notes.write_text("")
        command = ["bash", str(top / "tools/setup.sh"), *words]
        done = subprocess.run(command, env=env | changes, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [line.partition("constraints.txt ")[2] for line in notes.read_text().splitlines()]

    return _setup


def test_torch_from_pip_as_it_is(setup):
    assert setup() == ["-e ."]
    assert setup() == []
    assert setup("dev") == ["-e .[dev]"]
    assert setup() == []


def test_torch_from_elsewhere_is_remembered(setup):
    """And replaces one that is there, which pip would keep."""
    first, second = "https://example.org/cu126", "https://example.org/cu130"
    assert setup() == ["-e ."]
    assert setup(TORCH_INDEX_URL=first) == [f"--force-reinstall --index-url {first} torch", "-e ."]
    assert setup(TORCH_INDEX_URL=first) == setup() == []
    assert setup("dev") == [f"--index-url {first} torch", "-e .[dev]"]
    assert setup(TORCH_INDEX_URL=second) == [f"--force-reinstall --index-url {second} torch", "-e ."]
    assert setup() == []


def test_nothing_is_deleted_from_a_venv_that_somebody_else_made(setup, tmp_path):
    """Not later either, when it has been installed into before."""
    venv = tmp_path / "checkout/.venv"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(tmp_path / "bin/python3", venv / "bin/python")
    (venv / "theirs").touch()
    assert setup() == ["-e ."]
    url = "https://example.org/cu126"
    assert setup(TORCH_INDEX_URL=url) == [f"--force-reinstall --index-url {url} torch", "-e ."]
    assert (venv / "theirs").exists()
