"""Reading out of shards that fail, are missing for a while, or do not answer."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from datapipe.dataset import shard_files, shard_reader
from datapipe.errors import ShardReadError


@pytest.fixture
def fifo(tmp_path):
    """A file whose open() hangs until the test is over."""
    path = tmp_path / "hangs"
    os.mkfifo(path)
    yield path
    with suppress(OSError):  # nobody waits for it
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def begin(function, *arguments) -> threading.Thread:
    def ending():
        with suppress(ShardReadError):
            function(*arguments)

    thread = threading.Thread(target=ending, daemon=True)
    thread.start()
    return thread


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("io", shard_reader.IOS)
def test_a_shard_that_hangs_keeps_no_other_and_not_the_end(tmp_path, fifo, io):
    (tmp_path / "good").write_bytes(b"x" * 5000)
    reader = shard_reader.ShardReader([fifo, tmp_path / "good"], io)
    hanging = [begin(reader.read, 0, 0, 10) for _ in range(3)]
    eventually(lambda: len(reader._under_way) == 3)
    reads = begin(lambda: reader.read(1, 100, 10))
    reads.join(10)
    assert not reads.is_alive(), "the hanging open keeps the other shard from being opened"
    assert reader.oldest().path == fifo
    closes = begin(reader.close)
    closes.join(10)
    assert not closes.is_alive(), "closing waits for the thread that hangs"
    assert all(thread.is_alive() for thread in hanging) and reader.oldest() is None
    assert bytes(reader.read(1, 100, 10)) == b"x" * 10
    reader.close()


def is_open(path):
    """Whether this process has the file open or mapped; what earlier tests left to threads does not count."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(descriptor))
    return str(path) in links or str(path) in Path("/proc/self/maps").read_text()


def test_a_file_is_closed_when_its_last_reader_is_done(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    for io in ("cached", "mmap"):
        reader = shard_reader.ShardReader([tmp_path / "a"], io)
        data = reader.read(0, 10, 10)
        assert is_open(tmp_path / "a")
        reader.close()
        assert bytes(data) == b"x" * 10
        del data
        assert not is_open(tmp_path / "a")


def test_a_shard_that_is_missing_for_a_while(tmp_path, caplog):
    path = tmp_path / "later"
    reader = shard_reader.ShardReader([path], retries=9)
    (tmp_path / "new").write_bytes(b"x" * 100)
    appears = threading.Timer(2.0, (tmp_path / "new").rename, [path])
    appears.start()
    data = []
    threads = [begin(lambda: data.append(bytes(reader.read(0, 10, 10)))) for _ in range(8)]
    for thread in threads:
        thread.join(30)
    appears.join()
    reader.close()
    assert data == [b"x" * 10] * 8
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"{path}: is missing, and with it 10 bytes at 10; try 1 of 10, trying again in 0.1 s"
    assert len(lines) <= 8, lines  # a line for each pause of 0.1 to 1.6 s; not of each of the eight threads


def test_a_pause_ends_when_the_reader_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "FIRST_WAIT_S", 60.0)
    reader, caught = shard_reader.ShardReader([tmp_path / "none"], retries=9), []

    def read():
        try:
            reader.read(0, 0, 10)
        except ShardReadError as error:
            caught.append(str(error))

    thread = begin(read)
    eventually(lambda: reader.oldest() is not None and reader.oldest().problem)
    assert "is missing" in reader.oldest().problem
    reader.close()
    thread.join(10)
    assert not thread.is_alive() and "is missing" in caught[0]
