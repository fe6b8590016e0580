"""A Slurm cluster of four nodes, from a testbed beside the checkout; what needs it is skipped where that is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import limit_s

ROOT = Path(__file__).parents[2]
TESTBED = ROOT.parent / "shared" / "testbed"
# Of the nodes' addresses, where they have some; each process of pytest-xdist has clusters of its own.
SUBNET = f"93.{20 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"
STALL_S = 20  # of the filesystem's answer to a task that is to be killed meanwhile

needs_testbed = [
    pytest.mark.slow,
    pytest.mark.testbed,
    pytest.mark.skipif(not TESTBED.exists(), reason="there is no testbed beside the checkout"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to start Slurm"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="the kernel has no FUSE"),
]


def wait_until(true: Callable[[], object], seconds: float = 90, describe: Callable[[], str] = str) -> None:
    """`describe`: says what there is instead, if it does not come true."""
    end = time.monotonic() + limit_s(seconds)
    while not true():
        assert time.monotonic() < end, f"did not happen in time: {describe()}"
        time.sleep(0.2)


class Cluster:
    """Slurm with four nodes; `shared`: a folder that all see, on a slow filesystem; `backing`: the same, fast."""

    def __init__(self, folder: Path, run: Callable[..., subprocess.CompletedProcess]) -> None:
        self.folder, self.shared, self.backing = folder, folder / "shared/slow", folder / "backing"
        self._run = run

    def run(self, *line: str | Path) -> str:
        """What a command of Slurm says, run in the shared folder."""
        return self._run("bash", "-c", '. "$0" && exec "$@"', self.folder / "env.sh", *line, cwd=self.shared).stdout

    def submit(self, *line: str | Path, check: int | None = None) -> str:
        """The new job's number; `check`: wait for its end, with this exit code."""
        job = self.run("sbatch", "--parsable", "--time=5", "--cpus-per-task=2", *line).strip()
        if check is not None:
            assert self.exit_code(job) == f"{check}:0", self.logs(job)
        return job

    def is_running(self, job: str) -> bool:
        """Or about to; of an array: any element. "JOB_3" is one."""
        return bool(self.run("squeue", "--noheader", f"--jobs={job}"))

    def exit_code(self, job: str) -> str:
        """ "CODE:SIGNAL", once it has ended; of an array: the highest."""
        wait_until(lambda: not self.is_running(job), 240)
        return max(re.findall(r" ExitCode=(\d+:\d+)", self.run("scontrol", "show", "job", job)))

    def start_soon(self, job: str) -> None:
        """Start a requeued job, where Slurm would hold it back for two minutes; Slurm may have started it already.

        But not within the second in which it was killed: a node refuses such a start ("Job credential revoked").
        """
        update = f"scontrol update JobId={job} StartTime=now+3"
        self.run("bash", "-c", f"{update} || scontrol show job {job} | grep -E 'JobState=(RUNNING|COMPLET)'")

    def start_again(self, job: str) -> None:
        """Start a requeued job soon, and wait for its end."""

        def describe() -> str:
            log = (self.folder / "log/slurmctld.log").read_text()
            return self.run("scontrol", "show", "job", job) + self.logs(job) + log[-4000:]

        wait_until(lambda: "PENDING" in self.run("squeue", "--noheader", "--format=%T", f"--jobs={job}"))
        self.start_soon(job)
        states = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        wait_until(lambda: "COMPLETED" in self.run(*states), 240, describe)

    def logs(self, job: str) -> str:
        paths = [path for path in sorted(self.shared.glob("*.out")) if re.search(rf"-{job}(_\d+)?\.out$", path.name)]
        return "".join(path.read_text() for path in paths)

    @contextlib.contextmanager
    def stalled(self, path: Path) -> Iterator[None]:
        """Meanwhile, who opens the file gets no answer for a while."""
        control = self.shared / ".slowfs"
        inside = str(path.relative_to(self.shared)).replace(" ", "?")
        control.write_text(json.dumps({"faults": [f"open:*{inside}:1+:stall={STALL_S}"]}))
        try:
            yield
        finally:
            control.write_text(json.dumps({"faults": []}))
