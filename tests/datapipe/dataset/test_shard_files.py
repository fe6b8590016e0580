"""A read that returns less than it was asked for, as some filesystems let it, is continued where it stopped."""

import mmap
import os

import pytest

from datapipe.dataset.shard_files import ALIGNMENT, DirectFile, File, room_for

CONTENT = bytes(number % 251 for number in range(5 * ALIGNMENT + 100))
OFFSET, SIZE = 70, 3 * ALIGNMENT


@pytest.fixture
def short_reads(monkeypatch):
    """Reads of a page at most."""
    read, read_into = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, ALIGNMENT), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read_into(fd, [parts[0][:ALIGNMENT]], at))


@pytest.mark.parametrize("kind", [File, DirectFile])
@pytest.mark.parametrize("has_memory", [False, True])
def test_what_a_read_leaves_out_is_read_by_the_next(kind, has_memory, tmp_path, short_reads):
    (tmp_path / "shard").write_bytes(CONTENT)
    into = memoryview(mmap.mmap(-1, room_for(SIZE))) if has_memory else None
    assert bytes(kind(tmp_path / "shard").read(OFFSET, SIZE, into)) == CONTENT[OFFSET : OFFSET + SIZE]
    beyond = len(CONTENT) - 10
    assert bytes(kind(tmp_path / "shard").read(beyond, SIZE, into)) == CONTENT[beyond:], "the file ends"
