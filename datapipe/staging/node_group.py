"""Bytes from each node to all others: a process group of gloo's, over the interface by which a node reaches process 0.

A training's group is not used.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .crew import LISTEN_S, Crew
from .store import CrewError

CONNECTS = 5  # how often gloo tries to connect, each time for as long as it may take


class NodeGroup:
    """The connections between all nodes; processes that lead a node make it together.

    Args:
        crew: the nodes.
        interface: the network interface; None: the one that leads to process 0.
        timeout_s: how long another node may take, in seconds.

    Raises:
        CrewError: they cannot be connected; names the addresses of both sides.
    """

    def __init__(self, crew: Crew, interface: str | None, timeout_s: float) -> None:
        self._crew = crew
        address = crew.find_address(interface)
        # torch's stubs lack these; it makes its own groups of them in the same way.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=max(LISTEN_S, timeout_s / CONNECTS))
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            group = dist.ProcessGroupGloo(crew.open_store("gloo"), crew.index, len(crew), options)
        except RuntimeError as error:
            raise CrewError(f"{crew.explain(error)}; this node's address is {address}") from error
        group._set_default_timeout(timedelta(seconds=timeout_s))
        self._group = group

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> None:
        """Send bytes to all nodes, and receive those of each.

        Args:
            mine: uint8[n].
            everyones: uint8[nodes, n], is filled.

        Raises:
            CrewError: a node is gone, or has not taken part in time; names it.
        """
        try:
            # As dist.all_gather_into_tensor does: the list of allgather() would be copied from memory of its own.
            self._group._allgather_base(everyones.view(-1), mine).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise CrewError(self._crew.explain(error)) from error
