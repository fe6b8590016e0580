"""A loader's settings have the same names and defaults wherever a user gives them."""

import inspect
from typing import get_type_hints

import pytest
from typer.main import get_command

from datapipe.cli import app
from datapipe.loaders import LoaderOptions, open_loader
from datapipe.sampling.augment import Augment
from trainer.config.recipe import Data

PARAMETERS = inspect.signature(open_loader).parameters


def test_open_loader_takes_the_options():
    options = inspect.signature(LoaderOptions, eval_str=True).parameters
    assert [*PARAMETERS.items()][1:] == [*options.items()]
    assert [name for name, parameter in PARAMETERS.items() if parameter.kind is not parameter.KEYWORD_ONLY] == [
        "path", "batch_size"
    ]  # fmt: skip
    assert get_type_hints(open_loader).keys() == {*PARAMETERS, "return"}


def test_wrong_arguments_are_those_of_open_loader():
    for arguments in ({"batchsize": 4}, {}):
        with pytest.raises(TypeError, match=r"^open_loader\(\) .* argument:? 'batch_?size'"):
            open_loader("packed", **arguments)


def test_help_describes_each_setting():
    for described in (open_loader, LoaderOptions):
        documented = inspect.getdoc(described).partition("Args:")[2].partition("Returns:")[0]
        for name in inspect.signature(described).parameters:
            assert f"\n    {name}: " in documented, name
    assert "options" not in PARAMETERS and "\n    options: " not in inspect.getdoc(open_loader)


def test_a_recipe_has_the_settings_and_their_defaults():
    """But those that follow from the run: who it runs on, which split it reads, and the recipe's [train]."""
    data = Data.model_fields
    elsewhere = {"path", "split", "batch_size", "train", "seed", "rank", "world_size", "device", "last", "augment"}
    assert PARAMETERS.keys() - elsewhere <= data.keys()
    for name in PARAMETERS.keys() - elsewhere - {"size"}:
        assert data[name].default in (None, PARAMETERS[name].default), name  # None leaves it to `open_loader`
    assert all(data[name].default == getattr(Augment(), name) for name in ("crop", "flip", "pad"))


@pytest.mark.parametrize("left_out", [True, False])
def test_a_recipe_s_settings_reach_the_loader(left_out):
    given = {"threads": 3, "backend": "dali", "cache": "/local", "io": "mmap", "block_mib": 4, "max_bad": 1,
             "retries": 2, "timeout_s": 5.0}  # fmt: skip
    data = Data(size=32, mean=(0.5,), std=(0.5,), **({} if left_out else given))
    assert data.loader_settings() == ({"backend": "cpu"} if left_out else given)
    assert given.keys() == PARAMETERS.keys() & Data.model_fields.keys() - {"size", "order"}


def test_bench_has_the_defaults():
    """Except for the size, which is the images' own, and a batch that suits most accelerators."""
    options = {option.name: option for option in get_command(app).commands["bench"].params}
    assert {"backend", "batch_size", "size", "threads", "order", "io", "device"} == options.keys() & PARAMETERS.keys()
    for name in options.keys() & PARAMETERS.keys() - {"batch_size", "size", "device"}:
        assert options[name].default == PARAMETERS[name].default, name
    assert options["device"].default == "cpu" and PARAMETERS["device"].default is None
