"""What has landed of a file is not copied again when the copy continues."""

import pytest

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
