"""Processes that start in a tenth of a second: one that has imported everything once, and forks for each of them.

Each is a process of its own, which does what Python does from then on. The server may be started by a command that
gives it, and so all that it forks, a mount namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trainer.reporting import plots

NEEDED = "trainer.run", "trainer.reporting.page", "trainer.models.resnet_cifar", "pytorch_optimizer"
NEEDED += tuple(f"matplotlib.backends.backend_{kind}" for kind in ("agg", "pdf", "svg"))


class Rank:
    """A process that a server has forked, with methods of `subprocess.Popen`; what it prints goes to files."""

    def __init__(self, server: RankServer, pid: int, printed: tuple[Path, Path]) -> None:
        self._server, self.pid, self._printed = server, pid, printed
        self._exit_code: int | None = None
        self._handle = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Unless the process has ended. Until its exit code was asked for, no other has its number."""
        if self._exit_code is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self, within_s: float | None = 0) -> int | None:
        """The exit code, less than 0 for a signal, once it has ended; `within_s`: how long to wait, None is forever."""
        if self._exit_code is None and select.select([self._handle], [], [], within_s)[0]:
            self._exit_code = self._server.ask({"wait": self.pid})
            os.close(self._handle)
        return self._exit_code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, *self.said())
        return self.said()

    def said(self) -> tuple[str, str]:
        out, err = (path.read_text(errors="surrogateescape") for path in self._printed)
        return out, err


class Ranks:
    """Several of them as one, which has failed if one has."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks

    def send_signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        codes = [rank.poll() for rank in self._ranks]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        said = [rank.communicate(deadline and max(0, deadline - time.monotonic())) for rank in self._ranks]
        return "".join(out for out, _ in said), "".join(err for _, err in said)


class RankServer:
    """The server, as its clients see it; `folder`: for what its processes print."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self.pid, self._process, self._folder = process.pid, process, folder
        self._ranks: list[Rank] = []

    def ask(self, request: dict) -> int:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments: Sequence[object], env: dict[str, str], cwd: Path | str = "") -> Rank:
        """Start `python ARGUMENTS` with this environment, in `cwd` as the server sees it."""
        out, err = printed = tuple(self._folder / f"{len(self._ranks)}.{end}" for end in ("out", "err"))
        out.touch(), err.touch()
        request = {"arguments": [*map(str, arguments)], "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)}
        self._ranks.append(Rank(self, self.ask(request), printed))
        return self._ranks[-1]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.poll(None)
        self._process.communicate()


@contextlib.contextmanager
def open_rank_server(folder: Path, env: dict[str, str], prefix: Sequence[str] = ()) -> Iterator[RankServer]:
    """Have a server whose processes run in `folder`. `prefix`: a command that becomes the one after it."""
    command = [*prefix, sys.executable, __file__]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=pipe, stdout=pipe, text=True)
    (folder / "printed").mkdir()
    server = RankServer(process, folder / "printed")
    try:
        yield server
    finally:
        server.close()


def serve() -> None:
    """Answer requests from standard input, one a line: the number of a new process, or the exit code of one."""
    for name in NEEDED:
        __import__(name)
    plots.PLOTS = plots.PLOTS[:1]  # of the report that each training ends with; reports have tests of their own
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run(**request)
            sys.exit()
        print(pid, flush=True)


def _run(arguments: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """Do what Python does with these arguments."""
    with open(os.devnull, "rb") as nothing, open(out, "wb") as output, open(err, "wb") as errors:
        for number, file in enumerate((nothing, output, errors)):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # which torch reads as it is imported
    match arguments:
        case ["-m", name, *_]:
            sys.argv = arguments[1:]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [path, *_]:
            sys.argv, sys.path[0] = arguments, str(Path(path).parent)
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    serve()
