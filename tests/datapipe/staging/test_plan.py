"""The pure functions of staging: every byte is copied once, and every chunk that somebody lacks is read by one node."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from datapipe.staging.exchange import LEAST_BYTES, ROUND_BYTES, chunk_bytes_for
from datapipe.staging.plan import cut_files, share_reads, stagger

SIZES = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 500)), max_size=30)


@given(SIZES, st.integers(1, 100))
def test_chunks_are_all_bytes_once(sizes, chunk_bytes):
    chunks = cut_files(sizes, chunk_bytes)
    assert all(0 <= sum(extent.size for extent in chunk) <= chunk_bytes for chunk in chunks)
    ends = dict.fromkeys(range(len(sizes)), 0)
    for extent in chain.from_iterable(chunks):
        assert extent.offset == ends[extent.file] and extent.offset % chunk_bytes == 0
        ends[extent.file] += extent.size
    assert [*ends.values()] == sizes and {extent.file for extent in chain.from_iterable(chunks)} == ends.keys()
    whole = [file for chunk in chunks if len(chunk) > 1 for file in (extent.file for extent in chunk)]
    assert all(sizes[file] <= chunk_bytes for file in whole)


@given(SIZES, st.integers(1, 100), st.integers(1, 5), st.integers(1, 4))
def test_each_node_copies_all_in_an_order_of_its_own(sizes, chunk_bytes, num_nodes, width):
    chunks = cut_files(sizes, chunk_bytes)
    orders = [stagger(chunks, node, num_nodes, width) for node in range(num_nodes)]
    assert all(sorted(order) == sorted(chunks) for order in orders)
    firsts = {order[0] for order in orders if order}
    files = len({chunk[0].file for chunk in chunks})
    assert len(firsts) == min(num_nodes, files)


def test_several_files_at_a_time():
    order = stagger(cut_files([30, 30, 30, 10], 10), 0, 1, 2)
    assert [chunk[0].file for chunk in order] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 2]


@given(
    st.integers(1, 6).flatmap(
        lambda nodes: st.integers(0, 40).flatmap(lambda chunks: arrays(bool, (nodes, chunks), elements=st.booleans()))
    ),
    st.integers(1, 4),
)
def test_what_somebody_lacks_is_read_by_one_node(missing, run):
    shares = share_reads(missing, run)
    assert sorted(chunk for share in shares for chunk in share) == np.flatnonzero(missing.any(axis=0)).tolist()
    assert all(share == sorted(share) for share in shares)
    for node, share in enumerate(shares):
        for chunk in share:  # from its own disk where any node can
            assert not missing[node, chunk] or missing[:, chunk].all()
    nowhere = missing.all(axis=0)
    counts = [int(nowhere[share].sum()) for share in shares]
    assert max(counts) - min(counts) <= run


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 64, 65, 1000, 1024, 5000])
def test_a_round_fits_into_memory(num_nodes):
    size = chunk_bytes_for(num_nodes, 8 << 20)
    assert LEAST_BYTES <= size <= 8 << 20 and (8 << 20) % size == 0
    assert num_nodes * size <= ROUND_BYTES or size == LEAST_BYTES
    assert chunk_bytes_for(num_nodes, 1 << 20) == min(size, 1 << 20)
