"""Files that packing has C read: their bytes and checksums, and what is left to Python."""

from __future__ import annotations

import os

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datapipe import native
from datapipe.sources.paths import FLAGS

ROOM = 1000


def read(library, places, room=ROOM, stopped=0):
    memory, progress = memoryview(bytearray(room)), np.zeros(native.PROGRESS, np.int64)
    sizes = library.read_files(places, FLAGS | os.O_NOFOLLOW, memory, np.array([stopped], np.uint8), progress)
    assert progress[0] == 0
    return memory, sizes


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=8))
def test_files_lie_one_behind_the_other(library_of_session, tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("folder")
    descriptor = os.open(path, os.O_PATH)
    for i, content in enumerate(contents):
        (path / f"é {i}.jpg").write_bytes(content)
    for library in library_of_session:
        memory, sizes = read(library, [(descriptor, f"é {i}.jpg") for i in range(len(contents))])
        at = 0
        for content, (size, digest) in zip(contents, sizes, strict=True):
            if at + len(content) >= ROOM:  # one byte more would be needed to see the end
                assert size == -1
                continue
            assert size == len(content) and memory[at : at + size] == content
            assert digest == xxhash.xxh3_64_intdigest(content) & 0xFFFFFFFF
            at += size
    os.close(descriptor)


def test_what_is_left_to_python(library, tmp_path):
    path, descriptor = tmp_path, os.open(tmp_path, os.O_PATH)
    (path / "whole").write_bytes(b"x" * 100)
    (path / "link").symlink_to("whole")
    (path / "large").write_bytes(b"x" * ROOM)
    (path / "a folder").mkdir()
    names = ["whole", "link", "large", "a folder", "missing", "whole"]
    _, sizes = read(library, [(descriptor, name) for name in names])
    assert [size for size, _ in sizes] == [100, -1, -1, -1, -1, 100]
    _, sizes = read(library, [(-1, "whole"), (descriptor, "whole")])
    assert [size for size, _ in sizes] == [-1, 100]
    _, sizes = read(library, [(descriptor, "whole")] * 2, stopped=1)
    assert [size for size, _ in sizes] == [-1, -1]
    os.close(descriptor)
