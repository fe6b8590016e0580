"""How often a read that fails is repeated."""

import pytest

from datapipe.dataset import shard_files, shard_reader
from datapipe.errors import ShardReadError


@pytest.mark.parametrize(("retries", "tried"), [(0, ""), (1, " (tried 2 times)"), (3, " (tried 4 times)")])
def test_a_read_is_repeated_as_often_as_it_may_be(retries, tried, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    reader = shard_reader.ShardReader([tmp_path / "shard"], retries=retries)
    with pytest.raises(ShardReadError) as caught:
        reader.read(0, 7, 5)
    assert caught.value.message == f"is missing, and with it 5 bytes at 7{tried}"
