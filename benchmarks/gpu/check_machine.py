"""Say what of this machine the benchmarks of a GPU lack, and how to carry it; imports nothing that may be missing.

    python -m benchmarks.gpu.check_machine [--list]

Exit code 1: a package is missing without which no benchmark runs. `--list` prints the packages to carry.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("pytest", "hypothesis", "crc32c")  # of the extra dev, what tests/gpu imports
PURPOSES = {**dict.fromkeys(TESTS, "tests/gpu"), "setuptools": "the decoder in C"}
OPTIONAL = ("webdataset", "braceexpand", "turbojpeg")
DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")  # either of them
WORK = Path(os.environ.get("BENCHMARKS_WORK") or ROOT / "benchmarks" / "work")  # as in benchmarks/measure.py


class Need(NamedTuple):
    """Something that a benchmark needs."""

    name: str
    place: str  # version or place; "" if it is missing
    purpose: str
    is_essential: bool = False


def list_packages() -> list[str]:
    """Return the requirements that are carried: of this project, its build and its tests, without torch and DALI."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    extra = [line for line in project["optional-dependencies"]["dev"] if _name(line) in (*TESTS, *OPTIONAL)]
    lines = [*project["dependencies"], *extra, *content["build-system"]["requires"]]
    return [line for line in lines if _name(line) != "torch"]


def find_version(requirement: str) -> str:
    """Return the version of a package that is here; "" if it is missing or older than "name>=version" asks."""
    try:
        version = metadata.version(_name(requirement))
    except metadata.PackageNotFoundError:
        return ""
    least = re.search(r">=([\d.]+)", requirement)
    return version if least is None or _numbers(version) >= _numbers(least[1]) else ""


def find_needs() -> Iterator[Need]:
    """Yield all that the benchmarks need, the packages first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        yield Need(line, find_version(line), "everything", True)
    for line in list_packages():
        if line not in project["dependencies"]:
            yield Need(line, find_version(line), PURPOSES.get(_name(line), "some rows"))
    yield Need(" or ".join(DALI), next(filter(None, map(find_version, DALI)), ""), "DALI's rows")
    yield Need("torchvision", find_version("torchvision"), "its row")
    yield Need("cc (a compiler)", shutil.which("cc") or shutil.which("gcc") or "", "compiled rows, the decoder in C")
    yield Need("git, or a file COMMIT", _find_commit(), "the record's commit")
    originals = WORK / "originals"
    yield Need("photographs", str(originals) if originals.exists() else "", "JPEG rows; without, pictures are drawn")
    whole = WORK / "fashion-mnist-idx"
    yield Need("Fashion-MNIST", str(whole) if whole.exists() else "", "its target; without, a sample is trained on")


def _find_commit() -> str:
    if (ROOT / "COMMIT").exists():
        return "COMMIT"
    return shutil.which("git") or "" if (ROOT / ".git").exists() else ""


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def main() -> int:
    if sys.argv[1:] == ["--list"]:
        print("\n".join(list_packages()))
        return 0
    missing = [need for need in find_needs() if not need.place]
    for need in missing:
        print(f"missing: {need.name} – {'needed for' if need.is_essential else 'for'} {need.purpose}")
    if missing:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"to carry it, on a connected machine: bash benchmarks/gpu/carry.sh {version} carried")
        print(f"then put the folder carried into {ROOT}")
    return int(any(need.is_essential for need in missing))


if __name__ == "__main__":
    sys.exit(main())
