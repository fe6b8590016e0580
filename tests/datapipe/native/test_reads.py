"""Bytes that the decoder in C reads itself: each image gets its own, neighbours at once; faults are left to Python."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datapipe import clock, native
from datapipe.dataset.shard_reader import ShardReader
from tests.waiting import limit_s, wait_until

GAP = 4096  # bytes between two neighbours that are read at once
ROOM = 40_000  # bytes of a file
SAMPLES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30_000), st.integers(1, 500), st.booleans()), min_size=1, max_size=40
)
CONTENTS = [np.random.default_rng(number).bytes(ROOM) for number in range(2)]


def extents_of(samples):
    """(file, offset, size) of each: at the given offset, or a little behind the sample before."""
    extents = []
    for file, offset, size, is_behind in samples:
        if is_behind and extents:
            last_file, last_offset, last_size = extents[-1]
            file, offset = last_file, (last_offset + last_size + offset % (2 * GAP)) % 30_000
        extents.append((file, offset, size))
    return extents


def count_groups(extents) -> int:
    groups, last, end = 0, None, 0
    for file, offset, size in extents:
        groups += file != last or not 0 <= offset - end <= GAP
        last, end = file, offset + size
    return groups


def count_reads() -> int:
    """Count this thread's reads, this one not included."""
    file = os.open("/proc/thread-self/io", os.O_RDONLY)
    try:
        return int(os.read(file, 4096).split(b"syscr: ")[1].split()[0])
    finally:
        os.close(file)


def read(library, extents, files, is_direct=False) -> np.ndarray:
    """Have images read that no decoder takes: they come back as they are."""
    jobs = np.zeros(len(extents), native.JOB)
    jobs["fd"] = [files[file] for file, _, _ in extents]
    jobs["offset"], jobs["size"] = ([extent[i] for extent in extents] for i in (1, 2))
    jobs["is_direct"], jobs["has_checksum"] = is_direct, True
    digests = (xxhash.xxh3_64_intdigest(CONTENTS[file % 2][at : at + size]) for file, at, size in extents)
    jobs["checksum"] = [digest & 0xFFFFFFFF for digest in digests]
    decode(library, jobs)
    return jobs


def decode(library, jobs) -> None:
    stop, progress, spent_s = np.zeros(1, np.uint8), np.zeros(native.PROGRESS, np.int64), np.zeros(len(native.STAGES))
    assert library.decode(jobs, 3, 8, stop, progress, spent_s) == len(jobs)
    assert progress[0] == 0 and spent_s[0] > 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number, content in enumerate(CONTENTS):
        (folder / str(number)).write_bytes(content)
    files = [os.open(folder / str(number), os.O_RDONLY) for number in range(2)]
    yield files
    for file in files:
        os.close(file)


@given(SAMPLES, st.booleans())
def test_each_image_gets_its_bytes_and_neighbours_are_read_at_once(library_of_session, files, samples, is_direct):
    extents = extents_of(samples)
    for library in library_of_session:
        before = count_reads()
        jobs = read(library, extents, files, is_direct)
        assert count_reads() - before - 1 == count_groups(extents)
        for job, (file, offset, size) in zip(jobs, extents, strict=True):
            assert job["status"] == native.UNSUPPORTED
            assert ctypes.string_at(int(job["data"]), size) == CONTENTS[file][offset : offset + size]


@pytest.mark.parametrize("is_direct", [False, True])
def test_what_cannot_be_read_is_left_to_python_and_nothing_else(library, files, is_direct):
    good, behind_the_end, no_file = (0, 100, 50), (1, ROOM - 20, 40), (2, 0, 40)
    jobs = read(library, [good, behind_the_end, no_file, good], [*files, -1], is_direct)
    assert jobs["status"].tolist() == [native.UNSUPPORTED, native.UNREAD, native.UNREAD, native.UNSUPPORTED]
    assert ctypes.string_at(int(jobs["data"][3]), 50) == CONTENTS[0][100:150]


def test_bytes_that_are_not_those_of_the_checksum_are_left_to_python(library, files):
    jobs = np.zeros(2, native.JOB)
    jobs["fd"], jobs["size"], jobs["has_checksum"] = files[0], 40, True
    jobs["checksum"][1] = xxhash.xxh3_64_intdigest(CONTENTS[0][:40]) & 0xFFFFFFFF
    memory = np.frombuffer(CONTENTS[0], np.uint8)
    for data in (0, memory.ctypes.data):
        jobs["data"], jobs["status"] = data, 0
        decode(library, jobs)
        assert jobs["status"].tolist() == [native.UNREAD, native.UNSUPPORTED]


def test_a_read_that_hangs_inside_the_call_is_told_with_its_file_and_offset(library, tmp_path, monkeypatch):
    """What hangs here is the comparison of the second image, which belongs to its read."""
    gate, calls = threading.Event(), []

    @ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
    def hash_of(data, size):
        calls.append(size)
        if len(calls) == 2:
            gate.wait(limit_s())
        return 0

    monkeypatch.setattr(native, "find_hash", lambda: ctypes.cast(hash_of, ctypes.c_void_p).value)
    (tmp_path / "shard").write_bytes(CONTENTS[0])
    reader = ShardReader([tmp_path / "shard"])
    reader.read(0, 0, 1)  # opens it
    jobs, progress = np.zeros(2, native.JOB), np.zeros(native.PROGRESS, np.int64)
    jobs["size"], jobs["offset"], jobs["has_checksum"] = 40, [100, 20_000], True
    files = [reader.file_for(0, offset, 40) for offset in (100, 20_000)]
    jobs["fd"] = [file.locate(0, 40)[1] for file in files]

    def call():
        with reader.watch_chunk(files, [100, 20_000], progress):
            library.decode(jobs, 3, 8, np.zeros(1, np.uint8), progress, np.zeros(len(native.STAGES)))

    before = clock.now()
    thread = threading.Thread(target=call)
    thread.start()
    try:
        wait_until(lambda: len(calls) == 2)
        read = reader.oldest()
        assert (read.path, read.offset, read.problem) == (tmp_path / "shard", 20_000, "")
        assert before <= read.since <= clock.now()
    finally:
        gate.set()
        thread.join()
    assert reader.oldest() is None
    reader.close()


HOSTILE = [(2**63 - 17, 300), (-5000, 50), (0, -1), (50, -(2**63)), (-(2**63), 2**63 - 1), (0, 2**40)]


def test_offsets_and_sizes_that_no_image_has_are_left_to_python(library, files):
    good, data = (100, 50), np.frombuffer(CONTENTS[0], np.uint8)
    extents = [good, *HOSTILE, good]
    jobs = np.zeros(len(extents), native.JOB)
    jobs["fd"] = files[0]
    jobs["offset"], jobs["size"] = zip(*extents, strict=True)
    decode(library, jobs)
    assert jobs["status"].tolist() == [native.UNSUPPORTED, *[native.UNREAD] * len(HOSTILE), native.UNSUPPORTED]
    assert all(ctypes.string_at(int(jobs["data"][i]), 50) == CONTENTS[0][100:150] for i in (0, -1))
    jobs["data"], jobs["status"], jobs["offset"], jobs["size"] = data.ctypes.data + 100, 0, 0, -5
    decode(library, jobs)
    assert set(jobs["status"]) == {native.UNREAD}


def test_an_image_that_was_decoded_leaves_no_address_of_its_bytes(library, tmp_path):
    (tmp_path / "image").write_bytes(b"P6 8 8 255 " + bytes(8 * 8 * 3))
    out, jobs = np.ones((2, 8, 8, 3), np.uint8), np.zeros(2, native.JOB)
    jobs["size"], jobs["out"] = (tmp_path / "image").stat().st_size, [slot.ctypes.data for slot in out]
    jobs["width"], jobs["height"], jobs["box"], jobs["scale"] = 8, 8, (0, 0, 8, 8), 1
    with open(tmp_path / "image", "rb") as file:
        jobs["fd"] = file.fileno()
        assert not library.decode(jobs, 3, 8, np.zeros(1, np.uint8), np.zeros(native.PROGRESS, np.int64), np.zeros(3))
    assert not jobs["data"].any() and not out.any()
