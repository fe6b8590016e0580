"""What benchmarks share: their options, CPU seconds, rounds in turns, tables, and records that name the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Data sets and runs; git ignores the folder.
WORK = Path(os.environ.get("BENCHMARKS_WORK") or ROOT / "benchmarks" / "work").absolute()
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = ROOT / "COMMIT"  # of an archive without .git: the commit that it was made of
RAM_DISK = Path("/dev/shm")
PACKAGES = ("torch", "numpy", "Pillow", "simplejpeg", "webdataset", "h5py", "lmdb")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def command_line(doc: str, count: int = 0, rounds: int = 0, out: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with those of the common options that it has.

    Args:
        doc: The docstring of its module, whose first line says what it asks.
        count: Default of `--count`, if it has that.
        rounds: Default of `--rounds`, the same.
        out: Whether it has `--out`; see `out_folder`.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    if count:
        parser.add_argument("--count", type=int, default=count, help="images (default: %(default)s)")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="measured runs of each (default: %(default)s)")
    if out:
        parser.add_argument("--out", type=Path, help="write here (default: a RAM disk with room, else benchmarks/work)")
    return parser


def cpu_s() -> float:
    """Return the CPU seconds, user and system, of this process and of all its descendants, living or waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _living_descendants_s()


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of another process, and of its children that it has waited for (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold blanks
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S  # utime, stime, and those of its dead children


def _living_descendants_s() -> float:
    """Read them from /proc (proc(5)): the kernel adds a child to RUSAGE_CHILDREN only once it was waited for."""
    children: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()  # from the third field on: the name may hold blanks
        ticks = sum(int(field) for field in fields[11:15])  # utime, stime, and those of its dead children
        children.setdefault(int(fields[1]), []).append((int(path.parent.name), ticks / _TICKS_PER_S))
    total, parents = 0.0, [os.getpid()]
    while parents:
        for pid, seconds in children.get(parents.pop(), ()):
            total += seconds
            parents.append(pid)
    return total


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Yield a dictionary that has the `wall_s` and `cpu_s` of the block once it has ended."""
    seconds: dict[str, float] = {}
    cpu_began, began = cpu_s(), time.perf_counter()
    yield seconds
    seconds["wall_s"] = time.perf_counter() - began
    seconds["cpu_s"] = cpu_s() - cpu_began


def process(command: Sequence[str], allowed: Sequence[int] = (0,), **settings: Any) -> tuple[str, dict[str, float]]:
    """Run a command to its end, from the repository's root.

    Args:
        command: The program and its arguments.
        allowed: Exit codes that are not an error.
        settings: For Popen.

    Returns:
        standard output, and what the process and its children took: `process_wall_s`, `process_cpu_s`, and
        `process_peak_bytes`, the memory of the largest of them.

    Raises:
        ChildProcessError: another exit code.
    """
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **settings)
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in allowed:
        raise ChildProcessError(f"{' '.join(command)} ended with exit code {child.returncode}")
    return output, {
        "process_wall_s": wall_s,
        "process_cpu_s": usage.ru_utime + usage.ru_stime,
        "process_peak_bytes": usage.ru_maxrss * 1024,  # getrusage(2): in KiB
    }


class Child:
    """A process in the background that answers each line on its standard input with a line of JSON.

    Args:
        name: Of what it does, for messages.
        command: The program and its arguments, run from the repository's root.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipe)
        self.name = name

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_exc) -> None:
        self._process.stdin.close()
        self._process.wait()

    def ask(self, line: object) -> dict:
        """Send a line, and wait for the answer. Raises SystemExit where the process has ended."""
        try:
            self._process.stdin.write(f"{line}\n")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"error: {self.name} ended with exit code {self._process.wait()}")
        return json.loads(answer)


def open_answers() -> Callable[[object], None]:
    """Return what answers in a process that `Child` has started; what its libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=answers, flush=True)


def out_folder(asked: Path | None, needed_bytes: int) -> Path:
    """Return where a benchmark writes: where it was asked to, else a RAM disk with room, else benchmarks/work."""
    if asked is None:
        asked = WORK
        if RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free >= needed_bytes:
            asked = RAM_DISK
    asked.mkdir(parents=True, exist_ok=True)
    return asked


def interleaved(names: Sequence[str], rounds: int, run: Callable[[str, int], dict]) -> dict[str, list[dict]]:
    """Call `run(name, round)` for A B C, A B C, …, so that a slow hour slows all alike.

    Args:
        names: Of what is compared.
        rounds: How often each runs.
        run: Returns figures.

    Returns:
        the figures of each name's runs.
    """
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            results[name].append(run(name, number))
            load = os.getloadavg()[0]
            print(f"  round {number + 1} of {rounds}: {name}, load {load:.1f}", flush=True)
    return results


def compare(
    names: Sequence[str], rounds: int, run: Callable[[str, int], dict], keys: Sequence[str] = ()
) -> dict[str, dict]:
    """Run all in turns, as `interleaved` does, and return what `summarise` says of each one's runs."""
    return {name: summarise(runs, keys) for name, runs in interleaved(names, rounds, run).items()}


def summarise(runs: Sequence[dict], keys: Sequence[str] = ()) -> dict:
    """Return the spread of the figures `keys` (all, if none are named), and the `runs` themselves."""
    return {key: column(runs, key) for key in keys or runs[0]} | {"runs": runs}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def column(runs: Sequence[dict], key: str) -> dict[str, float]:
    return spread(run[key] for run in runs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in columns, the first aligned to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(line)))])
        for line in lines
    )


def shown(figures: Mapping[str, float], digits: int = 0) -> str:
    """Return `median (min–max)`, with thousands separated."""
    median, low, high = (f"{figures[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def environment() -> dict:
    """Return hardware, system, versions and commit, for the head of a record.

    To be called before the runs: the code on disk may change under them. What cannot be known is None: the version of a
    package that is missing, and without git what has changed since the commit that the file COMMIT names.
    """
    changed = _git("status", "--porcelain", "--", "datapipe", "trainer", "benchmarks/*.py")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": first_line_with("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": COMMIT.read_text().strip() if COMMIT.exists() else _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
    }


def write_record(name: str, record: dict) -> Path:
    """Write results/NAME.json, which gets its name only when it is whole."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def first_line_with(path: str, key: str) -> str | None:
    """Return what follows the colon of the first line that begins with a key; None without such a line or file."""
    if not Path(path).exists():
        return None
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return what git prints of this checkout; None if there is no git, or this is an unpacked archive."""
    if COMMIT.exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
