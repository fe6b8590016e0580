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
