"""Processes of the tests' own server: what they share with it, how they end, and what it refuses."""

import subprocess
import sys

import pytest

from tests.processes import clean_environment

NUMBERS = "import random, numpy; print(random.random(), numpy.random.random())"
PRINTS = "import sys; print('words'); sys.exit({code})"


def test_each_process_has_random_numbers_of_its_own(server):
    first, second = (server.run("-c", NUMBERS, check=True).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("code", [0, 1])
def test_output_that_cannot_be_written_at_the_end_is_a_failure(server, code):
    """As it is to a new interpreter, with which it is compared."""
    program = PRINTS.format(code=code)
    with open("/dev/full", "w") as full:
        with server.start("-c", program, stdout=full) as child:
            errors = child.stderr.read()
        real = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() | {"PYTHONUNBUFFERED": ""},
        )
    assert child.returncode == real.returncode == 120
    assert errors.splitlines()[-1:] == real.stderr.splitlines()[-1:] != []


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "PYTHONPATH", "LC_ALL", "LANG"])
def test_a_variable_that_only_a_new_interpreter_reads_is_refused(server, name):
    with pytest.raises(ValueError, match=rf"other values of {name}: use subprocess"):
        server.start("-c", "", env=clean_environment(**{name: "7"}))


def test_processes_that_are_over_are_forgotten(server):
    server.run("-c", "")
    with server.start("-c", "input()", stdin=subprocess.PIPE) as waiting:
        for _ in range(3):
            server.run("-c", "")
        before = len(server._processes)
        for _ in range(3):
            server.run("-c", "")
        assert waiting in server._processes and len(server._processes) == before
