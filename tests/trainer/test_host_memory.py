"""Memory that is freed is used again, without a page fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.host_memory import HUGE_PAGES, keep_freed_memory

ROOT = Path(__file__).parents[2]
ROUNDS, TENSOR_BYTES = 20, 32 << 20
CHILD = f"""
import resource, sys
from trainer.host_memory import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
import torch

faults = []
for _ in range({ROUNDS}):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del_me = torch.ones({TENSOR_BYTES} // 4)
    del del_me
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[2:]))
"""


def faults(how: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))}
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        environ.pop(name, None)
    command = [sys.executable, "-c", CHILD, how]
    done = subprocess.run(command, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_tensor_takes_the_memory_of_one_that_was_freed():
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


def test_runs_on_the_processor_keep_theirs(start, packed, recipe_file, tmp_path):
    code = (
        "import os, sys; from trainer.cli import app; app(sys.argv[1:], standalone_mode=False);"
        f"print('huge pages:', os.environ.get({HUGE_PAGES!r}))"
    )
    words = ["train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--set", "train.epochs=1"]
    child = start("-c", code, *words, env={"PYTHONPATH": str(ROOT)})
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert "huge pages: 1" in out
