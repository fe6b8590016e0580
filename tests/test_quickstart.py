"""tools/quickstart.sh up to the fetch, with stand-ins that write down how they are called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CALLED = """#!/bin/sh
echo "$(basename "$0") $*" >>"$NOTES"
"""
INTERRUPTED = 130


@pytest.fixture
def quickstart(tmp_path):
    """quickstart(user's number, whether apt knows the package, exit code of an update) -> the calls of apt-get and
    datapipe.
    """
    tools, programs, notes = tmp_path / "checkout/tools", tmp_path / "bin", tmp_path / "notes"
    tools.mkdir(parents=True)
    programs.mkdir()
    shutil.copy(ROOT / "tools/quickstart.sh", tools)
    (tools / "setup.sh").touch()

    def _quickstart(user: int, is_known: bool, update: int = 0, **variables: str) -> list[str]:
        scripts = {
            "id": f"#!/bin/sh\necho {user}\n",
            "apt-cache": f"#!/bin/sh\nexit {0 if is_known else 100}\n",
            "apt-get": f"{CALLED}exit {update}\n",
            "datapipe": f"{CALLED}exit {INTERRUPTED}\n",
        }
        for name, script in scripts.items():
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        notes.write_text("")
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(notes), **variables}
        command = ["bash", str(tools / "quickstart.sh"), str(tmp_path / "work")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == INTERRUPTED, done.stderr
        return [" ".join([words[0], words[-1] if words[0] == "apt-get" else words[1]])
                for words in map(str.split, notes.read_text().splitlines())]  # fmt: skip

    return _quickstart


@pytest.mark.parametrize("update", [0, 100], ids=["works", "fails"])
def test_root_renews_the_lists_of_an_apt_that_does_not_know_the_package(quickstart, update):
    assert quickstart(0, is_known=False, update=update) == ["apt-get update", "datapipe fetch"]


def test_apt_is_left_alone_otherwise(quickstart, tmp_path):
    assert quickstart(0, is_known=True) == ["datapipe fetch"]
    assert quickstart(1000, is_known=False) == ["datapipe fetch"]
    assert quickstart(0, is_known=False, DATAPIPE_MIRROR="https://example.org/mirror") == ["datapipe fetch"]
    (tmp_path / "work/raw").mkdir()
    assert quickstart(0, is_known=False) == ["datapipe fetch"]
