"""What the errors say of themselves."""

import inspect

import pytest

import datapipe.errors
import trainer.errors

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
