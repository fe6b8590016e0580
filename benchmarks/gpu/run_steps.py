"""Run the benchmarks of one GPU, the most valuable first, and write a record and a page.

    python -m benchmarks.gpu.run_steps OUT [--dry-run] [--only NAME …] [--limit-s 570]

Each step is a process of its own, forked before anything has touched the GPU, with a time limit. Its figures are in
OUT/steps as soon as it has ended; OUT/record.json and OUT/page.html hold all of them. A step that failed is recorded
with the end of what it printed, and the next one begins. The same command again continues with the steps that have no
record of this commit and these versions; one whose package has arrived since is done then. It stops by itself before
the limit: exit code 75 says "call again", 0 that all steps are done, 1 that all are recorded and some failed, 2 that
there is no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import (
    Conditions,
    Figures,
    Step,
    bench_accuracy_gpu,
    bench_kfac_gpu,
    bench_loader_gpu,
    bench_train_gpu,
)
from benchmarks.gpu.result_page import write_page
from benchmarks.measure import ROOT, command_line, environment, first_line_with
from datapipe.fsio import atomic_write
from datapipe.locks import BusyError, hold_lock

CALL_AGAIN = 75  # EX_TEMPFAIL of sysexits.h, as `trainer train` has it
LEAVING_S = 10  # of a call's time, kept for the record and the page
DRY_S = 10  # that a step takes in a dry run
MOST_BEGINNINGS = 2  # of a step that the end of a call cut off: then it has failed
TAIL_CHARACTERS = 3000
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
MACHINE, TESTS = "machine: GPU", "tests: tests/gpu"


def describe_gpu(at: Conditions) -> Figures:
    """Return what the record says of the GPU and its driver."""
    if at.device == "cpu":
        return {"gpu": None}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": first_line_with("/proc/driver/nvidia/version", "NVRM version"),
    }


class Outcomes:
    """A plug-in of pytest that counts how tests ended."""

    def __init__(self) -> None:
        self.figures: Figures = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.figures[report.outcome] += 1
        if report.failed:
            self.figures["failures"].append(report.nodeid)


def run_tests(at: Conditions) -> Figures:
    """Run the tests that a GPU is for; without one, the cheapest of them."""
    import pytest

    outcomes = Outcomes()
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests" / "gpu")]
    code = pytest.main([*words, *(["-k", "normalise"] if at.device == "cpu" else [])], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return outcomes.figures


STEPS = [
    Step(MACHINE, describe_gpu, 10, 60),
    Step(TESTS, run_tests, 150, 400, ("pytest", "hypothesis", "crc32c")),
    *bench_train_gpu.STEPS,
    *bench_kfac_gpu.STEPS,
    *bench_loader_gpu.STEPS,
    *bench_accuracy_gpu.STEPS,
]


def lacks(step: Step) -> list[str]:
    """Return the packages that a step needs and this Python does not find."""

    def is_there(name: str) -> bool:
        with suppress(ModuleNotFoundError):  # the package around it is missing
            return importlib.util.find_spec(name) is not None
        return False

    return [name for name in step.needs if not is_there(name)]


def _be_child(step: Step, at: Conditions, log: Path, sender: Connection) -> None:
    """Measure, in a process that ends when the one ends that forked it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1, encoding="utf-8", errors="backslashreplace")
    for number in (1, 2):  # for what is not written in Python
        os.dup2(sys.stdout.fileno(), number)
    os.chdir(ROOT)
    try:
        sender.send(("done", step.measure(at)))
    except BaseException as error:  # also of a benchmark that gives up with SystemExit
        traceback.print_exc()
        sender.send(("failed", {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}))


def measure_in_child(step: Step, at: Conditions, log: Path, limit_s: float) -> tuple[str, Figures]:
    """Run a step in a process of its own.

    Returns:
        "done" and the figures, "failed" and the error, or "ended" and an error if the limit has passed.
    """
    context = multiprocessing.get_context("fork")  # a new interpreter would import torch for each step
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_be_child, args=(step, at, log, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            return "ended", {"error": f"not done after {limit_s:.0f} s"}
        return receiver.recv()
    except EOFError:
        child.join()
        return "failed", {"error": f"its process ended with exit code {child.exitcode}"}
    finally:
        for end in (os.killpg, os.kill):  # its own children, too; a process that has just begun leads no group yet
            with suppress(ProcessLookupError):
                end(child.pid, signal.SIGKILL)
        child.join()


class Records:
    """The records of the steps, one file each in OUT/steps; those of another commit or other versions do not count."""

    def __init__(self, out: Path, is_dry_run: bool) -> None:
        here = environment()
        self._out, self.environment = out, here
        versions = {name: here["versions"][name] for name in ("python", "torch")}
        code = {name: here[name] for name in ("commit", "uncommitted_changes")}
        self._key = {**code, **versions, "dry_run": is_dry_run}
        (out / "steps").mkdir(exist_ok=True)

    def path(self, step: Step, suffix: str) -> Path:
        return self._out / "steps" / (re.sub(r"\W+", "-", step.name).strip("-") + suffix)

    def read(self, step: Step) -> dict[str, Any]:
        try:
            record = json.loads(self.path(step, ".json").read_text())
        except FileNotFoundError:
            return {}
        return record if record["key"] == self._key else {}

    def write(self, step: Step, status: str, beginnings: int, seconds: float = 0.0, **more: Any) -> None:
        record = {"step": step.name, "status": status, "beginnings": beginnings, "seconds": seconds, "key": self._key}
        _write_json(self.path(step, ".json"), record | more)

    def tail(self, step: Step) -> str:
        """Return the end of what a step printed."""
        path = self.path(step, ".log")
        return path.read_text(errors="replace")[-TAIL_CHARACTERS:] if path.exists() else ""

    def write_all(self, steps: list[Step]) -> None:
        """Write OUT/record.json, which has the machine in its head, and OUT/page.html."""
        records = [record for step in steps if (record := self.read(step))]
        gpu = next((record["figures"] for record in records if record["step"] == MACHINE), {})
        whole = {"environment": self.environment | gpu, **self._key, "steps": records}
        _write_json(self._out / "record.json", whole)
        write_page(self._out / "page.html", whole)


def _write_json(path: Path, content: object) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def is_left(step: Step, record: dict[str, Any]) -> bool:
    """Return whether a step is still to be done: it has no record, was cut off, or lacked what may be here by now."""
    return record.get("status") in (None, "begun", "ended") or (record["status"] == "lacks" and not lacks(step))


def do_step(step: Step, at: Conditions, records: Records, left_s: float) -> None:
    """Do a step and write its record; one that cannot be done here is recorded with the reason."""
    if step.needs_gpu and at.device == "cpu":
        return records.write(step, "needs a GPU", 0)
    if missing := lacks(step):
        return records.write(step, "lacks", 0, error=f"without {', '.join(missing)}")
    beginnings = records.read(step).get("beginnings", 0) + 1
    records.write(step, "begun", beginnings)  # counts also if this call is killed meanwhile
    limit_s = min(step.limit_s, left_s)
    began = time.monotonic()
    status, figures = measure_in_child(step, at, records.path(step, ".log"), limit_s)
    if status == "ended" and limit_s == step.limit_s:  # else the end of the call has cut it off
        status = "failed"
    more = {"figures": figures} if status == "done" else figures | {"tail": records.tail(step)}
    return records.write(step, status, beginnings, time.monotonic() - began, **more)


def run(steps: list[Step], at: Conditions, records: Records, limit_s: float) -> int:
    """Do the steps that are left, and return the exit code."""
    end = time.monotonic() + limit_s - LEAVING_S
    is_first = True
    while left := [step for step in steps if is_left(step, records.read(step))]:
        step, left_s = left[0], end - time.monotonic()
        if left_s < (step.about_s if at.device == "cuda" else DRY_S) and not is_first:
            records.write_all(steps)
            print("\n  ".join([f"{len(left)} steps are left:", *(step.name for step in left)]))
            print("call again: the same command continues", flush=True)
            return CALL_AGAIN
        if records.read(step).get("beginnings", 0) >= MOST_BEGINNINGS:
            tail = records.tail(step)
            records.write(step, "failed", MOST_BEGINNINGS, error="cut off by the end of each call", tail=tail)
            continue
        print(f"{step.name} … ", end="", flush=True)
        do_step(step, at, records, max(left_s, 1.0))
        record, is_first = records.read(step), False
        print(f"{record['status']} {record.get('error', '')} ({record['seconds']:.0f} s)", flush=True)
        if step.name == MACHINE and record["status"] == "failed":
            print("no GPU that works here; --dry-run runs all steps at tiny sizes on the processor")
            records.path(step, ".json").unlink()
            return 2
    records.write_all(steps)
    failed = [step.name for step in steps if records.read(step)["status"] == "failed"]
    print(f"all steps are done{', these failed: ' * bool(failed)}{', '.join(failed)}")
    return int(bool(failed))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Have the folder for this call alone."""
    try:
        with hold_lock(out, patience_s=0, waits=False):
            yield
    except BusyError:
        raise SystemExit(f"error: another call runs in {out}") from None


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, help="folder of the record and the page")
    parser.add_argument("--dry-run", action="store_true", help="all steps at tiny sizes, on the processor")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so")
    parser.add_argument("--limit-s", type=float, default=570, help="ends before (default: %(default)s)")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    at = Conditions.tiny(out) if arguments.dry_run else Conditions(out)
    steps = [step for step in STEPS if step.name == MACHINE or step.name.startswith(tuple(arguments.only))]
    with _alone(out):
        code = run(steps, at, Records(out, arguments.dry_run), arguments.limit_s)
    print(f"{out / 'page.html'}\n{out / 'record.json'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
