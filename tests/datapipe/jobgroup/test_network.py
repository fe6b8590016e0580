"""Nodes find out which of them do not reach each other, before they exchange anything."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from datapipe.jobgroup.network import TOKEN_BYTES, find_address, find_unreachable
from tests.waiting import limit_s

HOSTS = ["a", "b", "c"]
HERE = "127.0.0.1"


@pytest.fixture
def ask_all():
    """ask_all(addresses, lies={}) -> what each node of HOSTS hears; a lie replaces the token of a node's place."""

    def ask(addresses, lies=None):
        reported, barrier = {}, Barrier(len(HOSTS))

        def node(index):
            def gather(name, value):
                if name == "place" and index in (lies or {}):
                    value = [*value[:2], lies[index]]
                reported[name, index] = value
                barrier.wait(limit_s())
                return [reported[name, other] for other in range(len(HOSTS))]

            return find_unreachable(gather, index, HOSTS, addresses[index], limit_s())

        with ThreadPoolExecutor(len(HOSTS)) as pool:
            return [*pool.map(node, range(len(HOSTS)))]

    return ask


def test_nodes_that_reach_each_other(ask_all):
    assert ask_all([HERE, HERE, HERE]) == ["", "", ""]


def test_a_node_without_an_address_is_named_to_all(ask_all):
    answers = ask_all([HERE, "", HERE])
    assert len({*answers}) == 1
    assert answers[0].startswith(f"node 0 (a, {HERE}) does not reach node 1 (b, no address): ")
    assert answers[0].endswith("(2 of 3 pairs fail)")


def test_another_program_at_a_nodes_place_is_not_that_node(ask_all):
    expected = f"node 2 (c, {HERE}) does not reach node 0 (a, {HERE}): somebody else answers there (1 of 3 pairs fail)"
    assert ask_all([HERE, HERE, HERE], {0: "00" * TOKEN_BYTES}) == [expected] * 3


@pytest.mark.parametrize(
    ("index", "interface", "expected"),
    [(0, "lo", HERE), (1, "lo", HERE), (1, "eth99", ""), (0, None, HERE), (1, None, HERE)],
)
def test_a_node_tells_its_address_even_where_it_has_none(index, interface, expected):
    """The others wait for it; where it has none, they learn so from `find_unreachable`."""
    reported = []

    def gather(name, value):
        reported.append((name, value))
        return ["", HERE]

    assert find_address(gather, index, interface, "localhost") == expected
    assert reported == [("address", expected if index or interface else "")]
