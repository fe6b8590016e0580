"""Memory that is freed is used again, without a page fault."""

import os
from pathlib import Path

import pytest

from tests.processes import clean_environment
from trainer.config.recipe import load_recipe
from trainer.ranks.memory import HUGE_PAGES, keep_freed_memory
from trainer.run.run import run

ROUNDS, TENSOR_BYTES = 20, 32 << 20
CHILD = Path(__file__).parents[1] / "children" / "faults_of_tensors.py"


@pytest.fixture
def faults(server):
    """faults("kept") -> page faults of tensors that come after others of their size."""

    def _faults(how: str) -> int:
        set_up = ("MALLOC_", "THP_", "GLIBC_TUNABLES", "LD_PRELOAD")
        environ = {name: value for name, value in clean_environment().items() if not name.startswith(set_up)}
        done = server.run(CHILD, how, ROUNDS, TENSOR_BYTES, env=environ)
        if done.returncode == 3:
            pytest.skip("the C library is not glibc")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    return _faults


def test_a_tensor_takes_the_memory_of_one_that_was_freed(faults):
    pages = TENSOR_BYTES // os.sysconf("SC_PAGE_SIZE")
    assert faults("kept") < 2 * pages
    assert (
        faults("as it is") > (ROUNDS - 3) * pages // 512
    )  # or else there is nothing to keep: 512 pages are a huge one


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_was_set_up_stays(name):
    environ = {name: "x"}
    assert not keep_freed_memory(environ)
    assert environ == {name: "x"}


@pytest.mark.usefixtures("alone")
def test_runs_on_the_processor_keep_theirs(packed, recipe_file, tmp_path, monkeypatch):
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    recipe = load_recipe(str(recipe_file), ["train.epochs=1", "train.batch_size=330"])
    assert run(recipe, packed, tmp_path / "run") == 0
    assert os.environ[HUGE_PAGES] == "1"
