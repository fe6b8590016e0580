"""A filesystem that does not answer ends a run in time, and the error names the file.

A FIFO in place of a shard hangs whoever opens it.
"""

import os
import shutil

import pytest

from tests.trainer.runs import finish


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_hangs_ends_the_run(train, packed, tmp_path, split, patience_s):
    data = shutil.copytree(packed, tmp_path / "data")
    shard = data / split / "shard-000000.tar"
    shard.unlink()
    os.mkfifo(shard)
    changes = f"data.timeout_s={patience_s}", "data.retries=1", "train.epochs=1", "train.batch_size=330"
    code, _, errors = finish(train("run", *changes, data=data))
    last = errors.splitlines()[-1]
    assert code == 1 and last.startswith(f"error: {data / split}, shard {shard.name}: waiting for a"), errors
    assert f"timeout_s={patience_s})" in last and "Traceback" not in errors
