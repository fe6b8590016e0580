"""What the errors say of themselves."""

import errno
import inspect
import re
import signal
import tomllib
from pathlib import Path

import pytest

import datapipe.errors
import trainer.errors
from datapipe import console
from datapipe.loaders.device import Driver, dali_extra

ERRORS = [
    kind
    for module in (datapipe.errors, trainer.errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, Exception) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_docstring_of_its_own(kind):
    assert vars(kind)["__doc__"], "help() would be empty, or that of another class"


def test_there_are_errors():
    assert len(ERRORS) >= 12


def test_what_to_install_is_an_extra_and_a_command_that_shells_take():
    """zsh takes unquoted brackets for a pattern."""
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = []
    for path in sorted((root / "datapipe").rglob("*.py")):
        calls += re.findall(r'for_extra\((?:[^()]|\([^()]*\))*?"(\w+)"(?:, path)?\)', path.read_text())
    assert set(calls) == {"compress", "imagenet", "parquet", "tfrecord", "webdataset"} <= extras.keys()
    assert {dali_extra(driver) for driver in (None, Driver("535.1", 1))} == {"dali", "dali12"} <= extras.keys()
    assert "pip install '.[dali]'" in str(datapipe.errors.MissingBackendError.for_extra("DALI is missing", "dali"))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "full", "a"), "run the same command again when there is room"),
        (OSError(errno.EROFS, "read-only", "a"), "choose a folder that can be written to"),
        (datapipe.errors.ShardReadError("is missing"), "`datapipe verify DIR` names all damage of a data set"),
        (OSError(errno.EIO, "broken", "a"), ""),
    ],
)
def test_a_command_says_what_to_do(error, advice, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a SIGTERM is still pytest's

    def fail():
        raise error

    assert console.run(fail) == 1
    assert capsys.readouterr().err == f"error: {error}{'; ' * bool(advice)}{advice}\n"


EVIL = "caf\xe9\x1b[2J\nerror: all is well.jpg"
SHOWN = r"café\x1b[2J\nerror: all is well.jpg"


def test_what_others_have_named_is_escaped_in_logs_errors_and_tracebacks(server, tmp_path):
    """In a process of its own, since pytest has its own handlers of logs."""
    (tmp_path / EVIL).touch()
    code = """
import logging, sys
from datapipe import console
from datapipe.errors import DatapipeError, SettingError

def command():
    name = sys.argv[1]
    logging.getLogger("datapipe.a").warning("%s is left out", name)
    logging.getLogger("another").warning("two\\nlines: %s", name)
    try:
        open(name)
    except OSError as error:
        logging.getLogger("trainer.b").warning("logged", exc_info=error)
    console.print_lines(name)
    if sys.argv[2] == "value":
        raise ValueError(name)
    raise {"data": DatapipeError, "setting": SettingError}[sys.argv[2]](name)

sys.exit(console.run(command))
"""
    for kind in ("data", "setting", "value"):
        done = server.run("-c", code, EVIL, kind, cwd=tmp_path / "..")
        assert "\x1b" not in done.stdout + done.stderr and done.stdout == f"{SHOWN}\n", done
        lines = done.stderr.splitlines()
        assert f"WARNING {SHOWN} is left out" in lines[0] and lines[1].endswith("WARNING two"), lines
        if kind == "value":
            assert lines[-2].endswith(r"ValueError: café\x1b[2J"), lines
        else:
            assert lines[-1] == f"error: {SHOWN}", lines


def test_a_message_of_several_lines_keeps_them(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def fail():
        raise datapipe.errors.FetchError("no \x1bnetwork\n  place it by hand")

    assert console.run(fail) == 1
    assert capsys.readouterr().err == "error: no \\x1bnetwork\n  place it by hand\n"
