#!/usr/bin/env python3
"""Show that the tests find faults: change one line of the product, see a test fail, and so for each fault of a table.

    python tools/seeded_faults.py                # the faults that the default tests find
    python tools/seeded_faults.py --slow         # also those that only tests marked slow find
    python tools/seeded_faults.py --only fsync   # those with a word in their file, their promise or their test

Each entry of tests/seeded_faults.toml says what stands in a file of the product (`old`), what takes its place (`new`),
which promise that breaks, and the test, or the file of tests, that finds it. All happens in a copy of the checkout,
where the tests must first pass without any fault. A fault is found if its test fails, or hangs, which is said; a test
that is not there, or cannot be collected, finds nothing. One that is skipped here is counted apart: it needs what this
machine lacks. The exit code is 1 if a fault is not found.

Whoever mends a defect and tests that adds it to the table.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "seeded_faults.toml"
LIMIT_S = 120.0  # of a test on a quiet machine
PRELOADED = "pytest", "numpy", "PIL.Image", "pydantic", "torch"  # take longer to load than most tests
PASSED, FAILED, BROKEN, SKIPPED, HANGS = (
    0,
    1,
    3,
    6,
    None,
)  # exit codes of pytest, which has no 6, and what stands for one
OUTCOMES = {FAILED: "found", HANGS: "hangs", SKIPPED: "skipped"}


@dataclass(frozen=True)
class Fault:
    """A fault, as it stands in the table. `slow`: only a test that is marked slow finds it."""

    file: str
    old: str
    new: str
    breaks: str
    test: str
    slow: bool = False

    def apply_to(self, text: str) -> str:
        """Return the file's text with the fault. Raises ValueError unless `old` stands exactly once in it."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands {count} times in it, not once")
        return text.replace(self.old, self.new)


def read_faults(word: str, with_slow: bool) -> list[Fault]:
    """Read the faults of the table in which a word stands; those that are slow to find only `with_slow`."""
    faults = [Fault(**entry) for entry in tomllib.loads(TABLE.read_text())["fault"]]
    faults = [fault for fault in faults if with_slow or not fault.slow]
    return [fault for fault in faults if word.lower() in f"{fault.file} {fault.breaks} {fault.test}".lower()]


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """Yield a copy of the files that git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # one may just have been removed
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


@contextmanager
def seeded(fault: Fault, checkout: Path, number: int) -> Iterator[None]:
    """Change the product in a checkout for a block."""
    path = checkout / fault.file
    text, info = path.read_text(), path.stat()
    path.write_text(fault.apply_to(text))
    os.utime(path, (number, number))  # a time of its own, by which Python knows that its compiled code is not this
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def run_tests(tests: list[str], checkout: Path, slow: bool) -> tuple[int | None, str]:
    """Run tests in a forked process; return pytest's exit code, SKIPPED or HANGS, and what it has printed."""
    arguments = [*tests, "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *(["--slow"] if slow else [])]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = multiprocessing.get_context("fork").Process(target=become_pytest, args=(arguments, checkout, said))
        child.start()
        try:
            child.join(len(tests) * LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        finally:
            code = child.exitcode
            with suppress(ProcessLookupError):  # nothing that it has started is left
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
        said.seek(0)
        return code, said.read()


class Runs:
    """A plugin that counts the tests that are not skipped."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and not report.skipped


def become_pytest(arguments: list[str], checkout: Path, said: IO[str]) -> NoReturn:
    """Run pytest at the top of a checkout, and end this process."""
    os.setsid()
    for number in (1, 2):
        os.dup2(said.fileno(), number)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = sys.path[0] = str(checkout)
    code, runs = BROKEN, Runs()
    try:
        code = importlib.import_module("pytest").main(arguments, [runs])
        if code == PASSED and not runs.count:
            code = SKIPPED
        sys.stdout.flush()
    finally:
        os._exit(code)


def main() -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description="Show that the tests find faults in the product.")
    parser.add_argument("--only", metavar="WORD", default="", help="faults with this word in file, promise or test")
    parser.add_argument("--slow", action="store_true", help="also the faults that only tests marked slow find")
    options = parser.parse_args()
    faults = read_faults(options.only, options.slow)
    if not faults:
        sys.exit(f"no fault of {TABLE.name} has {options.only!r} in its file, promise or test; some need --slow")
    for name in PRELOADED:
        importlib.import_module(name)
    with copied_checkout() as checkout:
        for slow in {fault.slow for fault in faults}:
            tests = [*dict.fromkeys(fault.test for fault in faults if fault.slow == slow)]
            code, said = run_tests(tests, checkout, slow)
            if code not in (PASSED, SKIPPED):
                sys.exit(f"a test fails without a fault:\n{said[-3000:]}")
        outcomes: Counter[str] = Counter()
        for number, fault in enumerate(faults, start=1):
            began = time.monotonic()
            with seeded(fault, checkout, number):
                code, _ = run_tests([fault.test], checkout, fault.slow)
            outcome = OUTCOMES.get(code, "NOT FOUND")
            outcomes[outcome] += 1
            print(f"{outcome:9} {time.monotonic() - began:6.1f} s  {fault.file}: {fault.breaks}", flush=True)
    print(f"{len(faults)} faults: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(outcomes["NOT FOUND"] > 0)


if __name__ == "__main__":
    sys.exit(main())
