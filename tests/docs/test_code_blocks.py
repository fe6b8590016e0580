"""Code on the pages works: Python runs, shell commands are commands that exist, and settings are accepted."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
import typer.main

from datapipe.cli import app as datapipe_app
from datapipe.packing import PackOptions, pack
from trainer.cli import app as trainer_app
from trainer.config import built_in
from trainer.config.recipe import parse

APPS = {"datapipe": typer.main.get_command(datapipe_app), "trainer": typer.main.get_command(trainer_app)}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workplace(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages have it: raw/ and packed/fashion-mnist, and quickstart/packed, of few images."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "raw").mkdir()
    (folder / "raw" / "fashion-mnist").symlink_to(sample_dir)
    pack(sample_dir, folder / "packed" / "fashion-mnist", PackOptions(workers=1))
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "packed").symlink_to(folder / "packed" / "fashion-mnist")
    return folder


def test_python_runs(page_with_python: Path, blocks, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for number, block in enumerate(blocks(page_with_python, "python")):
        exec(compile(block, f"{page_with_python.name}, block {number + 1}", "exec"), {"__name__": "page"})


def test_commands_exist(page_with_commands: Path, commands) -> None:
    for program, name, *arguments in commands(page_with_commands):
        known = APPS[program].commands
        assert name in known, f"{page_with_commands.name}: there is no `{program} {name}`"
        known[name].make_context(f"{program} {name}", arguments)  # raises for an unknown option or a bad value


def test_pages_have_code(blocks, commands) -> None:
    """Blocks are found at all."""
    assert len(blocks(ROOT / "README.md", "python")) == 2
    assert len(blocks(ROOT / "docs" / "how-to" / "read-without-us.md", "python")) == 1
    assert [words[:2] for words in commands(ROOT / "README.md")] == [
        ["datapipe", "pack"],
        ["trainer", "launch"],
        ["datapipe", "stage"],
        ["trainer", "train"],
    ]
    assert len(list(commands(ROOT / "docs" / "reference" / "cli.md"))) >= 12


def test_the_steps_of_the_quickstart(commands, workplace: Path, tmp_path: Path, command) -> None:
    """All of them but getting the data, which needs a network, and training, which takes long."""
    (tmp_path / "raw").symlink_to(workplace / "raw")
    own = [words for words in commands(ROOT / "docs" / "tutorials" / "quickstart.md") if "cifar10" not in words[2]]
    steps = [words for words in own if words[1] in ("pack", "verify", "stage")]
    assert [words[1] for words in steps] == ["pack", "verify", "stage"]
    for words in steps:
        done = command(*words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "local" / "fashion-mnist" / "train" / "manifest.json").is_file()


def test_settings_are_accepted(page_with_toml: Path, blocks) -> None:
    """Parts of recipes, put into a built-in one; with another `name`, a section is as they have it."""
    for block in blocks(page_with_toml, "toml"):
        table = tomllib.loads(built_in()["imagenet-resnet50"].read_text())
        for section, its in tomllib.loads(block).items():
            if isinstance(its, dict):
                old = table.get(section, {})
                is_other = its.get("name", old.get("name")) != old.get("name")
                table[section] = its if is_other else old | its
        parse(table)
