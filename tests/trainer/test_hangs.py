"""A filesystem that does not answer ends a run in time, and the error names the file.

A FIFO in place of a shard hangs whoever opens it.
"""

import os
import shutil

import pytest

ENDS_S = 120  # by then it hangs; it takes about 10 s


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_hangs_ends_the_run(packed, recipe_file, start, tmp_path, split):
    data = shutil.copytree(packed, tmp_path / "data")
    shard = data / split / "shard-000000.tar"
    shard.unlink()
    os.mkfifo(shard)
    settings = ("data.timeout_s=2", "data.retries=1", "train.epochs=1")
    changes = [part for setting in settings for part in ("--set", setting)]
    run = start("-m", "trainer", "train", recipe_file, "--data", data, "--out", tmp_path / "run", *changes)
    _, errors = run.communicate(timeout=ENDS_S)
    last = errors.splitlines()[-1]
    assert run.returncode == 1 and last.startswith(f"error: {data / split}, shard {shard.name}: waiting for a"), errors
    assert "timeout_s=2" in last and "Traceback" not in errors
