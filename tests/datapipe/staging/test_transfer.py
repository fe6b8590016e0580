"""How often a read of the source that fails is repeated, and how fast reads follow each other."""

from types import SimpleNamespace

import pytest

from datapipe.dataset import shard_files
from datapipe.dataset.manifest import FileInfo
from datapipe.errors import ShardReadError
from datapipe.staging import StageOptions, copy, transfer
from datapipe.staging.transfer import SourceFile, Throttle


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_read_is_repeated_as_often_as_it_may_be(retries, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.0)
    info = FileInfo(name="shard", size_bytes=5, xxh3_128="0" * 32)
    source = SourceFile(tmp_path / "shard", info, Throttle(None), retries)
    with pytest.raises(ShardReadError, match="is missing"):
        source.fill(0, memoryview(bytearray(5)), lambda path=None: None)
    assert sum("trying again" in record.getMessage() for record in caplog.records) == retries


def test_max_mbps_are_millions_of_bytes_a_second(monkeypatch):
    now, throttles = [100.0], []

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(copy, "Throttle", lambda *rate: throttles.append(Throttle(*rate)))
    copy.transfers([], StageOptions(max_mbps=2), chunk_bytes=1)
    for num_bytes, seconds in ((3_000_000, 0.0), (1, 1.5)):
        throttles[0].wait(num_bytes, lambda path=None: None)
        assert now[0] == pytest.approx(100 + seconds)
