"""How often a read of the source that fails is repeated."""

import pytest

from datapipe.dataset.manifest import FileInfo
from datapipe.staging import source_files
from datapipe.staging.source_files import SourceFile, Throttle


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_read_is_repeated_as_often_as_it_may_be(retries, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(source_files, "FIRST_WAIT_S", 0.0)
    info = FileInfo(name="shard", size_bytes=5, xxh3_128="0" * 32)
    source = SourceFile(tmp_path / "shard", info, Throttle(None), retries)
    with pytest.raises(FileNotFoundError):
        source.read(0, memoryview(bytearray(5)), lambda path=None: None)
    assert sum("trying again" in record.getMessage() for record in caplog.records) == retries
