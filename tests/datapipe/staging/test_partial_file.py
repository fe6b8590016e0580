"""What has landed of a file is not copied again when the copy continues."""

import fcntl
import gc
import os
from pathlib import Path

import pytest

from datapipe.errors import DatapipeError
from datapipe.staging import StageOptions, stage
from datapipe.staging.partial_file import PartialFile
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same


@pytest.mark.parametrize("size", [4 * CHUNK, 4 * CHUNK + 5, 4 * CHUNK - 5])
@pytest.mark.parametrize("looks", [False, True])
def test_only_what_is_missing_is_copied_again(tmp_path, size, looks):
    manifest = make_data_set(tmp_path / "source", [size])
    shard, local = manifest.shards[0], tmp_path / "local"
    content = (tmp_path / "source" / shard.name).read_bytes()
    local.mkdir()
    with_gap = PartialFile(local / shard.name, shard, CHUNK, False)
    for number in (0, *range(2, -(-size // CHUNK))):
        with_gap.write(number * CHUNK, memoryview(content[number * CHUNK : (number + 1) * CHUNK]))
    with_gap.close()
    if looks:  # as before what is here is sent to other nodes
        again = PartialFile(local / shard.name, shard, CHUNK, False)
        again.drop_wrong(lambda path=None: None)
        assert again.missing_bytes == CHUNK
    (staged,) = stage(tmp_path / "source", local, StageOptions(chunk_mib=1, mode="copy"))
    assert staged.copied_bytes == CHUNK
    assert same(tmp_path / "source", local)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_check_that_is_ended_leaves_no_lock(tmp_path, steps):
    """Copying the rest in the same process would wait for it."""
    manifest = make_data_set(tmp_path / "source", [CHUNK])
    (shard,) = manifest.shards
    landing = PartialFile(tmp_path / shard.name, shard, CHUNK, False)
    calls = iter(range(steps - 1))

    def moved(path=None):
        if next(calls, None) is None:
            raise InterruptedError

    landing.write(0, memoryview((tmp_path / "source" / shard.name).read_bytes()))
    with pytest.raises(InterruptedError):
        landing.finish(moved)
    with open(tmp_path / f".{shard.name}.partial", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_files_of_a_copy_that_fails_are_closed(tmp_path):
    manifest = make_data_set(tmp_path / "source", [2 * CHUNK, 2 * CHUNK])
    (tmp_path / "source" / manifest.shards[1].name).unlink()
    before = open_files()
    with pytest.raises(DatapipeError, match="is missing"):
        stage(tmp_path / "source", tmp_path / "local", StageOptions(chunk_mib=1, mode="copy", retries=0))
    gc.collect()
    assert open_files() == before


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
