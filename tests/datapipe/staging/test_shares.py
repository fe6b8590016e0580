"""Which node reads or sends a chunk that others lack."""

import numpy as np

from datapipe.staging.plan import share_reads

LACKS, HAS = True, False


def test_nodes_that_have_the_same_chunks_send_them_in_turns():
    missing = np.array([[LACKS] * 6, [HAS] * 6, [HAS] * 6])
    assert share_reads(missing, run=1) == [[], [0, 2, 4], [1, 3, 5]]


def test_chunks_that_nobody_has_are_read_in_runs_of_neighbours():
    assert share_reads(np.full((2, 6), LACKS), run=2) == [[0, 1, 4, 5], [2, 3]]


def test_what_nobody_lacks_is_read_by_nobody():
    assert share_reads(np.full((2, 3), HAS), run=1) == [[], []]
