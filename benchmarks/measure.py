"""What every benchmark needs: the machine's description, CPU seconds, interleaved rounds, tables, records."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "benchmarks" / "work"  # data sets and runs; git ignores it
RESULTS = ROOT / "benchmarks" / "results"
RAM_DISK = Path("/dev/shm")
PACKAGES = ("torch", "numpy", "Pillow", "simplejpeg", "webdataset", "h5py", "lmdb")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU seconds, user and system, of this process and of all its descendants, living or waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _living_descendants_s()


def _living_descendants_s() -> float:
    """From /proc (proc(5)): the kernel adds a child to RUSAGE_CHILDREN only once it was waited for."""
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


def process(command: Sequence[str], allowed: Sequence[int] = (0,), **settings) -> tuple[str, dict[str, float]]:
    """Run to the end, from the repository's root: standard output, and what the process and its children took.

    `process_peak_bytes`: the largest memory of any one of them. `settings`: for Popen. Raises ChildProcessError for
    an exit code that is not `allowed`.
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


def out_folder(asked: Path | None, needed_bytes: int) -> Path:
    """Where a benchmark writes: as asked, else a RAM disk with room for that much, else benchmarks/work."""
    if asked is None:
        asked = WORK
        if RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free >= needed_bytes:
            asked = RAM_DISK
    asked.mkdir(parents=True, exist_ok=True)
    return asked


def interleaved(names: Sequence[str], rounds: int, run: Callable[[str, int], dict]) -> dict[str, list[dict]]:
    """What `run(name, round)` returned for each name: A B C, A B C, …, so that a slow hour slows all alike."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            results[name].append(run(name, number))
            load = os.getloadavg()[0]
            print(f"  round {number + 1} of {rounds}: {name}, load {load:.1f}", flush=True)
    return results


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def column(runs: Sequence[dict], key: str) -> dict[str, float]:
    return spread(run[key] for run in runs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns; the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(line)))])
        for line in lines
    )


def shown(figures: dict[str, float], digits: int = 0) -> str:
    """`median (min–max)`."""
    median, low, high = (f"{figures[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def environment() -> dict:
    """Hardware, system, versions and commit, for the head of a record."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "datapipe", "trainer", "benchmarks/*.py")),
    }


def write_record(name: str, record: dict) -> Path:
    """Write results/NAME.json under its name only when it is whole."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _first(path: str, key: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None


def _git(*arguments: str) -> str | None:
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None
