"""The worked examples of CONTRIBUTING.md: a copy of the code with their files and lines does what they promise."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import ProcessServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def extended(blocks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, and all examples put in as the page says."""
    folder = tmp_path_factory.mktemp("contributing")
    for package in ("datapipe", "trainer"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for block in [*blocks(PAGE, "python"), *blocks(PAGE, "toml")]:
        path = folder / name_in(block)
        assert not path.exists(), f"{path.name} is there already"
        path.write_text(block)
    for block in blocks(PAGE, "diff"):
        path = folder / name_in(block)
        lines = block.splitlines()[1:]
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        text = path.read_text()
        assert text.count(old) == 1, f"{path.name} does not have these lines once:\n{old}"
        path.write_text(text.replace(old, new))
    return folder


def name_in(block: str) -> str:
    return re.match(r"# ([\w/.-]+)\n", block)[1]


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env={"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_a_format_and_a_source(extended: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (40, 20, 24), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    run(extended, "-m", "datapipe", "pack", tmp_path / "digits.npz", tmp_path / "packed", "--format", "plain")
    assert "good" in run(extended, "-m", "datapipe", "verify", "--deep", tmp_path / "packed").stdout
    lines = run(extended, "-m", "datapipe", "info", tmp_path / "packed").stdout
    assert "40 images of 4 classes" in lines and "plain" in lines and "from npz" in lines
    code = (
        "import pathlib, sys; from datapipe.formats.plain import read; print(len([*read(pathlib.Path(sys.argv[1]))]))"
    )
    assert run(extended, "-c", code, tmp_path / "packed" / "train" / "shard-000000.bin").stdout.strip() == "40"


def test_a_loader(extended: Path, sample_dir: Path, tmp_path: Path) -> None:
    """It gives the batches of the loader that is there, except for rounding."""
    run(extended, Path(__file__).parent / "children" / "compares_loaders.py", sample_dir, tmp_path / "packed")


def test_a_network_an_optimizer_and_a_recipe(extended: Path, server: ProcessServer) -> None:
    """They are built; the slow test trains them."""
    done = server.run(Path(__file__).parent / "children" / "builds_examples.py", extended)
    assert (done.returncode, done.stdout) == (0, "Sequential AdamW\n"), done.stderr


@pytest.mark.slow
def test_a_network_an_optimizer_and_a_recipe_train(extended: Path, sample_dir: Path, tmp_path: Path) -> None:
    run(extended, "-m", "datapipe", "pack", sample_dir, tmp_path / "packed")
    assert "fashion-mnist-tiny" in run(extended, "-m", "trainer", "recipes").stdout
    done = run(
        extended,
        "-m",
        "trainer",
        "train",
        "fashion-mnist-tiny",
        "--data",
        tmp_path / "packed",
        "--out",
        tmp_path / "run",
    )
    accuracy = float(re.search(r"accuracy +([\d.]+)%", done.stdout)[1])
    assert accuracy > 50  # of ten classes
