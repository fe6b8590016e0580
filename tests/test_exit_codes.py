"""The exit codes of both commands, by what ends them: see `datapipe.console.run`."""

import errno
import signal

import pytest

from datapipe import console
from datapipe.errors import DatapipeError, SettingError


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (None, 0, ""),
        (DatapipeError("is damaged", path="a"), 1, "error: a: is damaged\n"),
        (OSError(errno.EIO, "broken", "a"), 1, "error: [Errno 5] broken: 'a'\n"),
        (SettingError("seed: -1"), 2, "error: seed: -1\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(130), 130, "interrupted\n"),  # as the command-line library makes of it
        (SystemExit(143), 143, "terminated\n"),
        (SystemExit(75), 75, ""),
        (SystemExit("text"), 1, ""),
        (SystemExit(), 0, ""),
    ],
    ids=repr,
)
def test_what_ends_a_command_gives_its_exit_code(end, code, said, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a SIGTERM is still pytest's

    def command():
        if end is not None:
            raise end

    assert console.run(command) == code
    assert capsys.readouterr().err == said
