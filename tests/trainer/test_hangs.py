"""A filesystem that does not answer ends a run in time, and the error names the file.

A FIFO in place of a shard hangs whoever opens it.
"""

import contextlib
import fcntl
import os
import shutil

import pytest

from tests.trainer.runs import finish
from tests.waiting import limit_s, wait_until
from trainer.ranks.heartbeat import Watch


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


def test_a_rank_says_in_which_file_it_is_and_what_it_did_before(tmp_path):
    """And no more, once the file is written: that was progress."""
    watch = Watch()
    watch.doing("evaluating, batch 2")
    began = watch._doing[3]
    with watch.at(tmp_path / "metrics.jsonl"):
        number, what, _, _, _ = watch._describe()
        assert (number, what.partition(" (filesystem: ")[0]) == (1, f"evaluating, batch 2, in {tmp_path}/metrics.jsonl")
        assert what.endswith(")")
        with watch.at(tmp_path / "checkpoint.pt"):
            assert f"in {tmp_path}/checkpoint.pt" in watch._describe()[1]
        assert "metrics.jsonl" in watch._describe()[1]
    assert watch._describe()[:3] == [1, "evaluating, batch 2", False] and watch._doing[3] > began


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_folder_that_hangs_ends_the_run_and_is_named(train, tmp_path):
    """A pipe in place of metrics.jsonl, which is read for two steps: then it is full, and who writes to it hangs."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    os.mkfifo(metrics)
    pipe = os.open(metrics, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    timeout, read = round(limit_s(4)), bytearray()
    changes = "train.epochs=200", "train.batch_size=30"
    ranks = train("run", *changes, words=["--resume", "--rank-timeout", timeout], ranks=2)

    def has_begun() -> bool:
        with contextlib.suppress(BlockingIOError):
            read.extend(os.read(pipe, 4096))
        return b'"step": 2,' in read

    wait_until(has_begun, ranks)
    code, _, errors = finish(ranks)
    os.close(pipe)
    last = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(last) == 2, errors
    for line in last:
        assert "because rank 0 (" in line and f", in {metrics} (filesystem: " in line, errors
