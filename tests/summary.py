"""The last lines of a run of the tests: what was skipped and why, and the files that cost the most CPU seconds."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_FILES = 10
COLLECTING = "(collecting the tests, in each worker)"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def spent_s() -> float:
    """Return the CPU seconds of this process and of all that it has started, what still runs included."""
    waiting, ticks = [os.getpid()], 0
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user and system, then those of children that were waited for
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
    return ticks / TICKS_PER_S


class Summary:
    """A pytest plugin. A worker of pytest-xdist measures, and the process that prints the summary adds up."""

    def __init__(self) -> None:
        self._collecting_s = self._before_s = 0.0
        self._costs: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._collecting_s = self._before_s = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = spent_s()
        report.cpu_s, self._before_s = now_s - self._before_s, now_s
        report.collecting_s, self._collecting_s = self._collecting_s, 0.0  # of this worker, with its first report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # pytest-xdist itself reports a worker that has crashed, without these.
        self._costs[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)
        self._costs[COLLECTING] += getattr(report, "collecting_s", 0.0)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}"] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in self._skipped.most_common():
            terminalreporter.write_line(f"{count:5} skipped: {reason}")
        terminalreporter.section(f"{self._costs.total() / 60:.1f} CPU-minutes, children included")
        for name, seconds in self._costs.most_common(NUM_FILES + 1):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
