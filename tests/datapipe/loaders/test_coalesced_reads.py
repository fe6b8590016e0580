"""Neighbours in a shard are read at once, and each sample gets its own bytes."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datapipe.dataset.shard_reader import ShardReader
from datapipe.loaders.coalesced_reads import GAP_BYTES, CoalescedReads, Extent, group_neighbours

SAMPLES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30_000), st.integers(1, 500), st.booleans()), max_size=40
)


def extents_of(samples):
    """Extents at the given offsets, or a little behind the sample before."""
    extents = []
    for number, (shard, offset, size, behind) in enumerate(samples):
        if behind and extents:
            last = extents[-1]
            shard, offset = last.shard, (last.offset + last.size + offset % (2 * GAP_BYTES)) % 30_000
        extents.append(Extent(number, shard, offset, size, 0))
    return extents


@given(SAMPLES)
def test_groups_are_neighbours_in_order(samples):
    extents = extents_of(samples)
    groups = group_neighbours(extents)
    assert [i for group in groups for i in group] == list(range(len(extents)))
    ends = {group[-1] for group in groups}
    for i, (a, b) in enumerate(itertools.pairwise(extents)):
        close = a.shard == b.shard and a.offset + a.size <= b.offset <= a.offset + a.size + GAP_BYTES
        assert close == (i not in ends)


class CountingReader(ShardReader):
    num_reads = 0

    def read(self, *arguments):
        self.num_reads += 1
        return super().read(*arguments)


@given(SAMPLES)
def test_each_group_is_read_once(tmp_path_factory, samples):
    folder, extents = tmp_path_factory.mktemp("shards"), extents_of(samples)
    contents = [np.random.default_rng(shard).bytes(30_500) for shard in range(2)]
    for shard, content in enumerate(contents):
        (folder / str(shard)).write_bytes(content)
    reader = CountingReader([folder / "0", folder / "1"])
    reads = CoalescedReads(reader, extents)
    for i, extent in enumerate(extents):
        assert bytes(reads.read(i)) == contents[extent.shard][extent.offset : extent.offset + extent.size]
    assert reader.num_reads == len(group_neighbours(extents))
    reader.close()
