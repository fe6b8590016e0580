"""Which node reads or sends a chunk that others lack."""

import numpy as np
import pytest

from datapipe.staging.plan import share_reads

LACKS, HAS = True, False


def test_nodes_that_have_the_same_chunks_send_them_in_turns():
    missing = np.array([[LACKS] * 6, [HAS] * 6, [HAS] * 6])
    assert share_reads(missing, run=1) == [[], [0, 2, 4], [1, 3, 5]]


def test_chunks_that_nobody_has_are_read_in_runs_of_neighbours():
    assert share_reads(np.full((2, 6), LACKS), run=2) == [[0, 1, 4, 5], [2, 3]]


def test_what_nobody_lacks_is_read_by_nobody():
    assert share_reads(np.full((2, 3), HAS), run=1) == [[], []]


@pytest.mark.parametrize("num_nodes", [64, 1024])
@pytest.mark.parametrize("lost", [0, 33])
def test_when_a_node_is_lost_each_byte_still_leaves_the_source_once(num_nodes, lost):
    """What it has given, one of the others gives to the rest, if it has reached that one; all else is read once."""
    missing = np.ones((num_nodes, 8 * num_nodes), bool)
    rounds = np.array(share_reads(missing, run=1)).T  # [rounds, nodes]
    missing[:, rounds[:3].ravel()] = False
    for reader, chunk in enumerate(rounds[3]):  # the round in which it is lost: some have what some have read
        missing[reader : reader + num_nodes // 4, chunk] = False
    left = np.delete(missing, lost, axis=0)
    shares = share_reads(left, run=1)
    again = np.concatenate([np.array(share, int) for share in shares])
    assert sorted(again) == np.flatnonzero(left.any(axis=0)).tolist()
    nowhere = int(left.all(axis=0).sum())
    read = 3 * num_nodes + num_nodes + nowhere  # until it was lost, and after that
    assert read <= missing.shape[1] + 1
    assert all(
        not left[node, chunk] for node, share in enumerate(shares) for chunk in share if not left[:, chunk].all()
    )
