"""The decoder in C touches no memory that is not its own, whatever it is given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .test_pixels import SUBSAMPLINGS, Case, encoded

ROOT = Path(__file__).parents[3]
FLAGS = ["-std=c11", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-DEXACT_ROOM"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
AVX2 = ["-mavx2", "-mbmi", "-mbmi2"]


@pytest.fixture(params=["plain", "avx2"])
def fuzz(request, tmp_path):
    """The program, compiled with sanitizers, for each variant."""
    compiler, program = shutil.which("cc"), tmp_path / "fuzz"
    if compiler is None:
        pytest.skip("no C compiler here")
    sources = [Path(__file__).with_name("fuzz.c"), *sorted((ROOT / "datapipe/native").glob("*.c"))]
    flags = [*FLAGS, *SANITIZERS, *(AVX2 if request.param == "avx2" else [])]
    done = subprocess.run([compiler, *flags, *sources, "-o", program, "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Small images of every kind that the decoder takes, with their sizes before them."""
    folder, paths = tmp_path_factory.mktemp("images"), []
    for i, subsampling in enumerate(SUBSAMPLINGS):
        for interval, optimised in ((0, False), (1, False), (3, True)):
            width, height = 21 + 9 * i, 60 - 7 * i
            case = Case(width, height, subsampling, 85, 5 * i, interval, optimised, (0, 0, 1, 1), 1, False, 3)
            paths.append(folder / f"{subsampling}-{interval}.jpg")
            paths[-1].write_bytes(f"{width} {height}\n".encode() + encoded(case))
    paths.append(folder / "pixels.ppm")
    paths[-1].write_bytes(b"20 30\nP6\n20 30\n255\n" + bytes(range(200)) * 9)
    return paths


@pytest.mark.slow
def test_damaged_images(fuzz, images):
    done = subprocess.run([fuzz, "100000", "1", *images], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    decoded, cut, smaller = map(int, done.stdout.split())
    assert 20_000 < decoded < 80_000  # neither are all refused, nor is none
    assert decoded < cut < 95_000  # the entropy-coded data are not looked at
    assert smaller > 5_000
