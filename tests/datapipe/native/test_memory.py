"""The decoder in C touches no memory that is not its own, whatever it is given, and no processor makes a difference."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .test_pixels import SUBSAMPLINGS, Case, encoded

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
SOURCES = sorted((ROOT / "datapipe/native").glob("*.c"))
FLAGS = ["-std=c11", "-ffp-contract=off"]
SANITIZERS = ["-DEXACT_ROOM", "-g", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Wundef", "-Werror"]
AVX2, NEON = ["-mavx2", "-mbmi", "-mbmi2"], ["-DDATAPIPE_NEON", "-fwrapv"]
VARIANTS = pytest.mark.parametrize("variant", [[], AVX2], ids=["plain", "avx2"])
PROCESSORS = {  # the compiler, and what runs its programs
    "avx2": (["cc", *AVX2], []),
    "neon": (["aarch64-linux-gnu-gcc", "-static", *NEON], ["qemu-aarch64"]),
    "64 bits": (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]),
    "32 bits": (["arm-linux-gnueabihf-gcc", "-static"], ["qemu-arm"]),
    "big-endian": (["s390x-linux-gnu-gcc", "-static"], ["qemu-s390x"]),
}

pytestmark = pytest.mark.slow


def run(*words):
    """Run a program; return what it prints. Skips the test where it is not installed, or compiles for AVX2 in vain."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} here")
    if "-mavx2" in words and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip("\n"), done.stderr
    return done.stdout


def build(program, main, compiler, *flags):
    run(*compiler, *FLAGS, *flags, HERE / main, *SOURCES, "-o", program, "-lm")
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


@VARIANTS
@pytest.mark.parametrize(
    ("compiler", "sanitizer", "count"),
    [("cc", "address,undefined", 100_000), ("clang", "memory", 20_000)],  # the second: what was never written
    ids=["address", "memory"],
)
def test_damaged_images(compiler, sanitizer, count, variant, tmp_path, images):
    flags = [*SANITIZERS, *variant, "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    fuzz = build(tmp_path / "fuzz", "fuzz.c", [compiler], *flags)
    decoded, cut, smaller = map(int, run(fuzz, str(count), "1", *images).split()[:3])
    assert count / 5 < decoded < count * 4 / 5  # neither are all refused, nor is none
    assert decoded < cut < count * 0.95  # the entropy-coded data are not looked at
    assert smaller > count / 20


@VARIANTS
def test_what_the_fuzzer_found(variant, tmp_path):
    """Each input once had the decoder read what is not its own, or add up numbers to what no integer holds."""
    flags = [*SANITIZERS, *variant, "-O1", *WARNINGS, "-fsanitize=fuzzer,address,undefined"]
    fuzz = build(tmp_path / "fuzz", "fuzz_coverage.c", ["clang"], *flags)
    inputs = sorted((HERE / "damaged").iterdir())
    done = subprocess.run([fuzz, *inputs], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("Executed ") == len(inputs) > 3, done.stderr


@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_gives_the_same_pixels(processor, tmp_path, images):
    compiler, runner = PROCESSORS[processor]
    here = build(tmp_path / "here", "fuzz.c", ["cc"], "-O2")
    there = build(tmp_path / "there", "fuzz.c", compiler, "-O2")
    assert run(*runner, there, "5000", "1", *images) == run(here, "5000", "1", *images)


@VARIANTS
@pytest.mark.parametrize("compiler", [["gcc", "-fanalyzer"], ["clang"], ["clang", "--analyze"]], ids=" ".join)
def test_compilers_have_nothing_to_say(compiler, variant, tmp_path):
    for source in SOURCES:
        run(*compiler, *FLAGS, "-O1", *variant, *WARNINGS, "-c", source, "-o", tmp_path / "object")
