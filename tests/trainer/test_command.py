"""The `trainer` command itself: help, the list of recipes, what it says of wrong use, and names of any bytes."""

import os
import tomllib
from pathlib import Path

import pytest

import datapipe
from tests.trainer.runs import finish
from trainer.config.recipe import load_recipe, parse

IMPORTS = Path(__file__).parent / "children" / "imports_of_help.py"
ONE_STEP = ["train.epochs=1", "train.batch_size=330"]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "--help"], ["recipes", "--help"]])
def test_help_has_an_example_and_needs_no_torch(start, arguments):
    code, out, err = finish(start(IMPORTS, *arguments, fresh=True))
    assert code == 0, err
    assert "Example" in out
    assert out.endswith("[]\n")


def test_recipes_and_version(cli):
    code, out, _ = cli("recipes")
    assert code == 0 and "cifar10-resnet32" in out
    code, out, _ = cli("recipes", "cifar10-resnet32")
    assert code == 0 and parse(tomllib.loads(out)) == load_recipe("cifar10-resnet32")
    code, _, errors = cli("recipes", "cifar10-resnet23")
    assert code == 2 and "; did you mean cifar10-resnet32?" in errors
    assert cli("--version")[:2] == (0, f"trainer {datapipe.__version__}\n")


@pytest.mark.parametrize("line", ["train", "train nosuch --data . --out x", "report a b", "fly"])
def test_wrong_use(cli, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    code, _, errors = cli(*line.split())
    assert code == 2 and errors and "Traceback" not in errors
    assert not (tmp_path / "x").exists()


def test_what_is_wrong_ends_the_process_with_its_code(start):
    code, out, err = finish(start("-m", "trainer", "fly"))
    assert (code, out) == (2, "") and "fly" in err and "Traceback" not in err


def test_a_name_that_is_no_utf8(train, tmp_path, metrics):
    """Output is strict UTF-8, as of a terminal."""
    name = os.fsdecode(b"run\xe9")
    code, out, err = finish(train(name, *ONE_STEP))
    assert code == 0 and "Traceback" not in err, err
    assert any(word.endswith(name) for word in metrics(tmp_path / name)[0]["command"])
    assert r"run\udce9/report.html" in out  # escaped, as both commands print such names


@pytest.mark.slow
def test_a_report_of_a_name_that_is_no_utf8(train, start, tmp_path):
    name = os.fsdecode(b"run\xe9")
    assert finish(train(name, *ONE_STEP))[0] == 0
    code, out, err = finish(start("-m", "trainer", "report", tmp_path / name))
    assert code == 0 and r"run\udce9/report.html" in out, err
