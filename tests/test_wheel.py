"""The wheel holds all that the commands need: built, installed into an environment without this checkout, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "datapipe", "trainer")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy, since setuptools writes beside what it builds."""
    pytest.importorskip("setuptools", "77", "building without the network needs setuptools here")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out, source)
    (path,) = out.glob("*.whl")
    return path


def pip(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", *arguments)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that knows nothing of this checkout; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    words = list(map(str, command))
    done = subprocess.run(words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    for name in ("datapipe", "trainer"):
        files = [path for path in (ROOT / name).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        files = [path for path in files if path.suffix not in (".c", ".h")]  # what they are compiled to is there
        assert {path.relative_to(ROOT).as_posix() for path in files} <= packed


@pytest.mark.slow
def test_commands_of_an_installed_wheel(wheel, sample_dir, tmp_path):
    """Its dependencies are those of the environment that runs the test, which a path file makes visible."""
    venv.create(tmp_path / "venv", symlinks=True)
    python, commands = tmp_path / "venv/bin/python", tmp_path / "venv/bin"
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    places = run(python, "-c", "import datapipe, trainer; print(datapipe.__file__, trainer.__file__)", cwd=tmp_path)
    assert places.count(str(site)) == 2

    assert "pack" in run(commands / "datapipe", "--help", cwd=tmp_path)
    assert "fashion-mnist-resnet8" in run(commands / "trainer", "recipes", cwd=tmp_path)
    run(commands / "datapipe", "pack", sample_dir, "packed", cwd=tmp_path)
    changes = ("--set", "train.epochs=1", "--set", "train.target_accuracy=0.05")
    train = ("train", "fashion-mnist-resnet8", "--data", "packed", "--out", "run", *changes)
    run(commands / "trainer", *train, cwd=tmp_path)
    (tmp_path / "run/report.html").unlink()
    run(commands / "trainer", "report", "run", cwd=tmp_path)
    assert "<svg" in (tmp_path / "run/report.html").read_text()
