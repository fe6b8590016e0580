"""The first blocks of an epoch are read in pieces: each byte once, and each sample gets its own."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.dataset.index import RECORD
from datapipe.dataset.shard_reader import ShardReader
from datapipe.loaders import blocks
from datapipe.loaders.blocks import PiecewiseRead

BLOCK_BYTES = 20_000


class RecordingReader(ShardReader):
    """Records what is read; with `cell`, wants the whole block for a copy, as `LocalFirstReader` may."""

    def __init__(self, path, cell):
        super().__init__([path])
        self.extents, self.kept, self._cell = [], [], cell

    def read(self, shard, offset, size, into=None):
        self.extents.append((offset, offset + size))
        return super().read(shard, offset, size, into)

    def extent_to_read(self, shard, start, stop, block_bytes):
        return (min(start, self._cell[0]), max(stop, self._cell[1])) if self._cell else (start, stop)

    def keep_block(self, shard, start, parts, block_bytes):
        self.kept.append((start, b"".join(parts)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 3000)), min_size=1, max_size=30),
    st.one_of(st.none(), st.tuples(st.integers(0, 500), st.integers(0, 500))),
    st.integers(1, 9000),
    st.randoms(),
)
def test_pieces(tmp_path_factory, samples, more, piece_bytes, random):
    records, at = np.zeros(len(samples), RECORD), 1000
    for record, (gap, size) in zip(records, samples, strict=True):
        record["offset"], record["size"] = at + gap, size
        at += gap + size
    content = np.random.default_rng(0).bytes(at + 1000)
    path = tmp_path_factory.mktemp("shards") / "0"
    path.write_bytes(content)
    start, stop = int(records[0]["offset"]), at
    cell = more and (start - more[0], stop + more[1])
    reader = RecordingReader(path, cell)
    before, blocks.PIECE_BYTES = blocks.PIECE_BYTES, piece_bytes
    try:
        read = PiecewiseRead(reader, records, BLOCK_BYTES)
    finally:
        blocks.PIECE_BYTES = before
    turns = list(range(len(samples)))
    random.shuffle(turns)
    for i in turns:
        offset, size = int(records[i]["offset"]), int(records[i]["size"])
        assert bytes(read.take(offset, size)) == content[offset : offset + size]
    extents = sorted(reader.extents)
    whole_start, whole_stop = cell or (start, stop)
    assert [begin for begin, _ in extents] == [whole_start, *(end for _, end in extents[:-1])]  # each byte once
    assert extents[-1][1] == whole_stop
    assert [records[first]["offset"] for first in read.firsts[1:]] == [begin for begin, _ in extents[1:]]
    longest = max(size for _, size in samples)
    assert all(end - begin <= piece_bytes + longest + 700 for begin, end in extents[1:-1])
    assert reader.kept == [(whole_start, content[whole_start:whole_stop])]
    reader.close()
