"""`trainer repeat`, whose trainings are forked off it: a new interpreter takes longer to start than they train.

Arguments: those of `trainer repeat`.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.processes import become, leave
from trainer.cli import main
from trainer.measuring import repeat


class Training:
    """A process with what `repeat` uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)


def fork(command: Sequence[str]) -> Training:
    """Take the place of `repeat.start_training`."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        runpy.run_path(str(Path(__file__).with_name("held.py")))
        for number in repeat._SIGNALS:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        files = [os.open(os.devnull, os.O_RDWR), os.dup(2), os.dup(2)]
        leave(
            functools.partial(
                become,
                files,
                list(command[1:]),
                dict(os.environ),
                os.getcwd(),
                host="",
                reports=False,
            )
        )
    return Training(pid)


repeat.start_training = fork
sys.exit(main())
