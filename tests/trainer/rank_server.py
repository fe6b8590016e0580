"""Ranks that start in a tenth of a second: a process that has imported everything once, and forks for each of them.

Each is a process of its own, which does what `trainer` does from then on. The server may be started by a command that
gives it, and so all its ranks, a mount namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NEEDED = "trainer.run", "trainer.reporting.page", "trainer.models.resnet_cifar", "pytorch_optimizer"


class Rank:
    """A process that a server has forked; `log` is where it writes what it says."""

    def __init__(self, server: RankServer, pid: int, log: Path) -> None:
        self._server, self.pid, self.log = server, pid, log
        self._exit_code: int | None = None
        self._handle = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended. Until its exit code was asked for, no other has its number."""
        if self._exit_code is None:
            os.kill(self.pid, number)

    def has_ended(self, within_s: float = 0) -> bool:
        return self._exit_code is not None or bool(select.select([self._handle], [], [], within_s)[0])

    @property
    def exit_code(self) -> int:
        """As of `subprocess`: less than 0 for a signal. Waits for the end."""
        if self._exit_code is None:
            self._exit_code = self._server.ask({"wait": self.pid})
            os.close(self._handle)
        return self._exit_code

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class RankServer:
    """The server, as its clients see it."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.pid, self._process = process.pid, process
        self._ranks: list[Rank] = []

    def ask(self, request: dict) -> int:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments: Sequence[object], env: dict[str, str], log: Path) -> Rank:
        """Start `trainer ARGUMENTS`, with these changes of the environment."""
        pid = self.ask({"arguments": [*map(str, arguments)], "env": env, "log": str(log)})
        self._ranks.append(Rank(self, pid, log))
        return self._ranks[-1]

    def close(self) -> None:
        for rank in self._ranks:
            rank.send(signal.SIGKILL)
            _ = rank.exit_code
        self._process.communicate()


@contextlib.contextmanager
def open_rank_server(folder: Path, env: dict[str, str], prefix: Sequence[str] = ()) -> Iterator[RankServer]:
    """Have a server whose ranks run in `folder`. `prefix`: a command that becomes the one after it."""
    command = [*prefix, sys.executable, __file__]
    pipe = subprocess.PIPE
    server = RankServer(subprocess.Popen(command, cwd=folder, env=env, stdin=pipe, stdout=pipe, text=True))
    try:
        yield server
    finally:
        server.close()


def serve() -> None:
    """Answer requests from standard input, one a line: the process number of a new rank, or the exit code of one."""
    for name in NEEDED:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _train(request)
        print(pid, flush=True)


def _train(request: dict) -> None:
    """Become the rank; ends as any Python program does."""
    with open(request["log"], "wb") as log, open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    os.environ.update(request["env"])
    sys.argv = ["trainer", *request["arguments"]]
    from trainer.cli import main

    sys.exit(main())


if __name__ == "__main__":
    serve()
