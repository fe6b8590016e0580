"""The nodes that are left when others are lost: they agree on who they are, and continue as a crew of their own.

Each node keeps a store, since the job's is lost with process 0. Nodes that see the loss come to the job's store, or
else to that of the first node that they reach. There they wait for each other for a few seconds; the first one whose
time is over says who has come, and that counts for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from .. import clock
from ..cluster import Placement
from ..errors import DatapipeError
from .group import LOOK_S, Crew
from .heart import LISTEN_S
from .network import address_towards
from .rendezvous import parting
from .secret import SignedStore
from .store import CrewError, ask, connect_store

_COME_S = 2 * LISTEN_S  # how long to wait for nodes of which nothing is heard


class Backups:
    """The stores of all nodes. They make them together.

    Args:
        crew: The nodes.

    Attributes:
        places: Address and port of each, by node.
    """

    def __init__(self, crew: Crew) -> None:
        self._own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on all addresses
        address = crew.placement.master
        with suppress(OSError):
            address = address_towards(address) if crew.index else address
        self.places: list[list[Any]] = crew.gather("backup", [address, self._own.port])


@contextmanager
def regrouped(crew: Crew, backups: Backups) -> Iterator[Crew]:
    """Continue without the nodes that `Crew.explain` has found to be lost.

    Args:
        crew: The nodes until now.
        backups: Their stores.

    Yields:
        The nodes that are left, this one among them.

    Raises:
        CrewError: No other is left, or the others have not waited for this one.
    """
    candidates = [node for node, rank in enumerate(crew.leaders) if rank not in crew.missing]
    stores, place = _find_stores(crew, backups, candidates)
    survivors = _agree(stores[0], crew, candidates)
    if crew.index not in survivors:
        raise CrewError("the other nodes continue without this one, which they did not hear of for too long")
    if len(survivors) == 1:
        raise CrewError("no other node is left")
    rank = survivors.index(crew.index)
    place = replace(place, rank=rank, world_size=len(survivors), has_store=True)
    rest = Crew(crew.noun, f"{crew.prefix}/again", stores, place, crew.timeout_s, crew.option)
    rest.settle([crew.hosts[node] for node in survivors], rank, [crew.numbers[node] for node in survivors])
    with parting(rest):
        yield rest


def _find_stores(
    crew: Crew, backups: Backups, candidates: list[int]
) -> tuple[tuple[SignedStore, SignedStore], Placement]:
    """Find where the nodes that are left meet: two connections to a store, and its place. Raises CrewError."""
    first, second = crew.stores
    if not crew.has_lost_store:
        return (first.below("again"), second.below("again")), crew.placement
    for node in candidates:
        host, port = backups.places[crew.numbers[node]]
        place = replace(crew.placement, master=host, port=port)
        with suppress(CrewError):
            raw = [connect_store(place, False, LISTEN_S) for _ in range(2)]
            return (first.below("again", raw[0]), second.below("again", raw[1])), place
    raise CrewError("no other node is reached")


def _agree(store: SignedStore, crew: Crew, candidates: list[int]) -> list[int]:
    """Wait for nodes that may be left, and return those that have come, the same on all of them. Raises CrewError.

    Args:
        store: The store at which they meet.
        crew: All nodes. Those of which the job's store hears are waited for.
        candidates: Numbers of those that may be left.
    """

    def come(nodes: Iterable[int]) -> set[int]:
        return {node for node in nodes if store.check([f"here/{node}"])}

    def agree() -> list[int]:
        store.set(f"here/{crew.index}", "")
        deadline, beats = clock.now() + _COME_S, ""
        while (absent := {*candidates} - come(candidates)) and not store.check(["survivors"]):
            if not crew.has_lost_store:
                before, beats = beats, repr(crew.read_beats([crew.leaders[node] for node in sorted(absent)]))
                deadline = deadline if beats == before else clock.now() + _COME_S
            if clock.now() > deadline:
                break
            time.sleep(LOOK_S)
        here = sorted(come(range(len(crew))))
        return [int(node) for node in json.loads(store.set_first("survivors", json.dumps(here)))]

    try:
        return ask(agree, crew.timeout_s + _COME_S)
    except (RuntimeError, DatapipeError) as error:
        raise CrewError("another node was lost while those that are left met") from error
