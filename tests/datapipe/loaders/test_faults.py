"""A loader on data and filesystems that fail."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from datapipe import native, watched
from datapipe.dataset import DataSet, shard_files, shard_reader
from datapipe.errors import DecodeError, SettingError, ShardCorruptError, ShardReadError
from datapipe.loaders import indexed, open_loader, painter
from datapipe.packing import PackOptions, pack
from tests.waiting import limit_s, read_until

CHILDREN = Path(__file__).parent / "children"
BACKENDS = ["cpu", "dali"]
try:
    import nvidia.dali  # noqa: F401
except ImportError:
    BACKENDS.remove("dali")


@pytest.fixture
def copied(tmp_path, packed_folders) -> Path:
    """A data set of 61 images in tar shards, to be spoilt."""
    return shutil.copytree(packed_folders["tar"] / "train", tmp_path / "copy")


def place(folder: Path, sample: int) -> tuple[str, int, int, str]:
    """Shard, offset, size and key."""
    with DataSet(folder) as data_set:
        record = data_set.index[sample]
        shard = data_set.manifest.shards[record["shard"]].name
        return shard, int(record["offset"]), int(record["size"]), data_set.key(sample)


def spoil(folder: Path, sample: int) -> str:
    """Flip a bit in the middle of a sample's bytes; return its key."""
    shard, offset, size, key = place(folder, sample)
    with open(folder / shard, "r+b") as file:
        file.seek(offset + size // 2)
        byte = file.read(1)[0]
        file.seek(offset + size // 2)
        file.write(bytes([byte ^ 8]))
    return key


# --- bad samples ---


def test_bad_samples_under_the_budget_are_named_and_masked(copied, backend, caplog):
    keys = {sample: spoil(copied, sample) for sample in (3, 40)}
    with open_loader(copied, 61, backend=backend, size=24, max_bad=2, train=False) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            ((batch),) = loader
            assert batch.valid.tolist() == [sample not in keys for sample in range(61)]
            assert not batch.images[~batch.valid].any() and batch.samples.tolist() == list(range(61))
    told = [record.getMessage() for record in caplog.records if "bad sample" in record.getMessage()]
    assert len(told) == 2  # once each, in two epochs
    for key in keys.values():
        assert any(f"key {key}: " in line and "rank 0" in line for line in told)
    with open_loader(copied, 61, backend=backend, size=24, max_bad=2) as loader:
        ((images, labels),) = loader.as_tuples()
        assert len(images) == len(labels) == 59 and images.flatten(1).any(1).all()
    with (
        open_loader(copied, 61, backend=backend, size=24, max_bad=1, train=False) as loader,
        pytest.raises(ShardCorruptError, match="not the ones that were packed"),
    ):
        list(loader)


def test_an_image_that_cannot_be_decoded_counts_as_bad(tmp_path, photo, encoded):
    good = encoded(photo(64, 64, 1))
    scan = good.index(b"\xff\xda")
    broken = good[:scan] + b"\xff\xda\x00\x0c\x03\x01\x77\x02\x77\x03\x77\x00\x3f\x00" + bytes(20) + b"\xff\xd9"
    for i in range(6):
        path = tmp_path / "raw" / "a" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(broken if i == 2 else good)
    pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=1))
    for backend in BACKENDS:
        with open_loader(tmp_path / "out" / "train", 2, backend=backend, size=24, max_bad=1) as loader:
            for _ in range(2):
                batches = list(loader)
                assert sum(int(batch.valid.sum()) for batch in batches) == 5
                for batch in batches:
                    assert not batch.images[~batch.valid].any() and batch.images[batch.valid].flatten(1).any(1).all()
        with (
            open_loader(tmp_path / "out" / "train", 6, backend=backend, size=24) as loader,
            pytest.raises(DecodeError, match="key a/2: "),
        ):
            list(loader)


# --- filesystems that fail ---


@pytest.fixture
def slow(mounted, packed_folders):
    """The data set on a filesystem without faults yet."""
    mounted.calm()
    target = mounted.backing / "data"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(packed_folders["tar"] / "train", target)
    try:
        yield mounted
    finally:
        mounted.calm()


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
@pytest.mark.parametrize("order", ["full", "blocks"])
def test_a_read_that_fails_is_tried_again_and_then_named(slow, error, order, caplog, monkeypatch):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.01)
    shard, offset, size, _ = place(slow.backing / "data", 30)
    with open_loader(slow.path / "data", 10, size=24, order=order, retries=2) as loader:
        slow.set(faults=[f"read:*/{shard}:@{offset + size // 2}:{error}"])
        with pytest.raises(ShardReadError) as caught:
            list(loader)
    message = str(caught.value)
    assert shard in message and ", key " in message and os.strerror(getattr(errno, error)) in message
    assert "bytes at " in message and "tried 3 times" in message and str(slow.path / "data") in message
    assert sum("trying again" in record.getMessage() for record in caplog.records) >= 2


@pytest.mark.parametrize("fault", ["read:*/{shard}:@{place}:EIO", "read:*/{shard}:@{place}:ESTALE",
                                   "open:*/{shard}:1+:ESTALE", "open:*/{shard}:1+:EIO"])  # fmt: skip
def test_a_fault_that_passes_is_not_an_error(slow, fault, caplog, monkeypatch):
    """As long as a file server's failover, by default; and whoever waits is told what for."""
    monkeypatch.setattr(watched, "WARN_S", 0.5)
    shard, offset, size, _ = place(slow.backing / "data", 30)
    pauses = []

    def note(record: logging.LogRecord) -> bool:
        if "trying again in" in record.getMessage():
            pauses.append(record.getMessage())
            if pauses[-1].endswith("0.8 s"):
                slow.calm()
        return True

    monkeypatch.setattr(shard_files.logger, "filters", [note])
    with open_loader(slow.path / "data", 61, size=24) as loader:
        slow.set(faults=[fault.format(shard=shard, place=offset + size // 2)])
        ((batch),) = loader
    assert batch.valid.all()
    assert str(slow.path / "data" / shard) in pauses[0]
    tries = [f"try {number} of 10, trying again in {0.1 * 2 ** (number - 1):g} s" for number in (1, 2, 3, 4)]
    assert sorted({line.partition("; ")[2] for line in pauses}) == tries
    said = [record.getMessage() for record in caplog.records]
    assert any("it is being tried again" in line and shard in line for line in said)


def test_the_kernel_is_told_ahead_where_reads_are_slow(packed_folders, monkeypatch):
    """Each sample but those of the first batches, before it is read."""
    told, reads, read = [], [], shard_reader.ShardReader.read

    def slowly(reader, shard, offset, size):
        time.sleep(0.05)
        reads.append((shard, offset, (shard, offset) in told))
        return read(reader, shard, offset, size)

    def note(reader, shard, offset, size):
        assert size > 0
        told.append((shard, offset))

    monkeypatch.setattr(painter, "choose_native", lambda: native.Choice(None, ""))  # which would read itself
    monkeypatch.setattr(shard_reader.ShardReader, "read", slowly)
    monkeypatch.setattr(shard_reader.ShardReader, "will_read", note)
    shares, speeds = (indexed.SLOW_SHARE, 1.1, indexed.SLOW_SHARE), (indexed.SLOW_BYTES_PER_S, 1e9, 0.0)
    for share, speed, fewest, most in zip(shares, speeds, (60 - 5 * 4, 0, 0), (60, 0, 0), strict=True):
        monkeypatch.setattr(indexed, "SLOW_SHARE", share)
        monkeypatch.setattr(indexed, "SLOW_BYTES_PER_S", speed)
        told.clear()
        reads.clear()
        with open_loader(packed_folders["tar"] / "train", 4, size=64, threads=2) as loader:
            assert sum(len(batch.labels) for batch in loader) == 60
        assert len(reads) == 60 and fewest <= len(told) <= most
        assert sum(was_told for *_, was_told in reads) == len(told)


def test_hints_do_no_harm(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 9000)
    for io in shard_reader.IOS:
        reader = shard_reader.ShardReader([tmp_path / "a"], io)
        reader.will_read(0, 0, 9000)  # not open yet
        assert bytes(reader.read(0, 10, 5)) == b"xxxxx"
        reader.will_read(0, 100, 1 << 40)
        reader.close()


def test_a_shard_that_is_cut_short_in_mid_epoch_is_named(copied, monkeypatch):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.001)
    with open_loader(copied, 4, size=24, train=False) as loader:
        batches = iter(loader)
        next(batches)
        for path in copied.glob("*.tar"):
            os.truncate(path, 600)
        message = r"\.tar.*truncated: \d+ bytes at \d+ end after \d+ \(tried 10 times\)"
        with pytest.raises(ShardReadError, match=message):
            list(batches)


def test_a_shard_that_disappears_is_named(copied, monkeypatch):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0.001)
    with open_loader(copied, 4, size=24) as loader:
        for path in copied.glob("*.tar"):
            path.unlink()
        with pytest.raises(ShardReadError, match=r"\.tar.*is missing, and with it \d+ bytes at \d+ \(tried 10 times\)"):
            list(loader)


def test_a_read_that_stalls_is_told_of(slow, caplog, monkeypatch):
    monkeypatch.setattr(watched, "WARN_S", 0.3)
    shard, offset, size, _ = place(slow.backing / "data", 30)
    with open_loader(slow.path / "data", 61, size=24) as loader:
        slow.set(faults=[f"read:*/{shard}:@{offset + size // 2}:stall=2"])
        ((batch),) = loader
    assert batch.valid.all()
    told = [record.getMessage() for record in caplog.records if "has not answered for" in record.getMessage()]
    # On a busy machine another read may take 0.3 s, too.
    assert any(shard in line for line in told) and all(str(slow.path / "data") in line for line in told)


def test_a_read_that_hangs_ends_the_job(server, slow, patience_s):
    """A thread in a read that never returns keeps neither the loop nor the process."""
    shard, offset, size, _ = place(slow.backing / "data", 30)
    slow.set(faults=[f"read:*/{shard}:@{offset + size // 2}:stall={2 * patience_s}"])
    settings = json.dumps({"batch_size": 61, "timeout_s": patience_s})
    child = server.start(CHILDREN / "loads_forever.py", slow.path / "data", settings)
    said = read_until(f"timeout_s={patience_s})", child.stderr, child)
    assert shard in said and "has not answered for" in said and "error: " in said
    slow.calm()  # FUSE keeps a killed process until it is answered
    assert child.wait(limit_s()) == 1


@pytest.mark.ranks
def test_when_one_rank_fails_the_others_end(start_ranks, copied, packed_folders):
    key = spoil(copied, 45)  # sample 45 is rank 1's
    ranks = start_ranks(2, CHILDREN / "trains_from_folders.py", packed_folders["tar"] / "train", copied)
    _, errors = ranks.communicate(limit_s())
    assert ranks.returncode == 1
    assert f"key {key}: " in errors and "not the ones that were packed" in errors


# --- ways of reading ---


@pytest.mark.parametrize("io", ["mmap", "direct"])
@pytest.mark.parametrize("order", ["full", "blocks"])
def test_ways_of_reading_give_the_same(packed_folders, io, order):
    folder = packed_folders["lmdb"] / "train"
    found = []
    for way in ("cached", io):
        with open_loader(folder, 61, size=24, io=way, order=order) as loader:
            found.append([batch.images.numpy().copy() for batch in loader])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("io", shard_reader.IOS)
def test_a_reader_against_the_file(tmp_path, io):
    content = np.random.default_rng(0).integers(0, 256, 100_001, np.uint8).tobytes()
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    reader = shard_reader.ShardReader([tmp_path / "a", tmp_path / "empty", tmp_path / "none"], io)
    for offset, size in ((0, 1), (0, 100_001), (4095, 2), (4096, 4096), (99_999, 2), (12_345, 70_000)):
        assert bytes(reader.read(0, offset, size)) == content[offset : offset + size]
    with pytest.raises(ShardReadError, match="truncated: 10 bytes at 99999 end after 2"):
        reader.read(0, 99_999, 10)
    with pytest.raises(ShardReadError, match="empty"):
        reader.read(1, 0, 1)
    with pytest.raises(ShardReadError, match="is missing"):
        reader.read(2, 0, 1)
    assert reader.oldest() is None
    reader.close()
    reader.close()


def test_direct_reads_leave_the_page_cache_alone_or_say_so(tmp_path, caplog):
    """/dev/shm may have no O_DIRECT: then reads go through the cache, with a warning."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = folder / f"datapipe-test-{os.getpid()}"
    path.write_bytes(b"x" * 5000)
    try:
        reader = shard_reader.ShardReader([path], "direct")
        assert bytes(reader.read(0, 4000, 1000)) == b"x" * 1000
        reader.close()
    finally:
        path.unlink()
    for record in caplog.records:
        assert "O_DIRECT" in record.getMessage() and record.levelno == logging.WARNING


@pytest.mark.parametrize(
    "settings", [{"io": "fast"}, {"retries": -1}, {"max_bad": -1}, {"timeout_s": 0}, {"block_mib": 0},
                 {"device": "foo"}, {"device": "meta"}, {"device": "cuda:99"}, {"device": 1.5}, {"train": "no"},
                 {"last": ""}, {"augment": "none"}, {"timeout_s": True}, {"timeout_s": "10"}, {"threads": True},
                 {"seed": 1.0}, {"size": None}, {"rank": None}, {"rank": 1}],
)  # fmt: skip
def test_bad_settings_are_named(packed_folders, settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        open_loader(packed_folders["tar"] / "train", 4, **settings)


def test_shards_that_were_opened_anew_are_closed(tmp_path, monkeypatch):
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 0)
    reader, failing = shard_reader.ShardReader([path], retries=1), [True]
    read = os.pread

    def pread(*arguments):
        failing[0] = not failing[0]
        if not failing[0]:
            raise OSError(5, "an error")
        return read(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert reader.read(0, 0, 100) == b"x" * 100
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    reader.close()
