"""Bytes from each node to all others: a process group of gloo's, over the interface by which a node reaches process 0.

A training's group is not used.
"""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import clock, watched
from .group import Crew
from .heart import LISTEN_S, LOST
from .store import CrewError

_POLL_S = 1e-3  # between looks whether all have come
_CONNECTS = 5  # how often gloo tries to connect, each time for as long as it may take


class NodeGroup:
    """The connections between all nodes; processes that lead a node make it together.

    Args:
        crew: The nodes.
        address: Address of this one, of `Crew.find_address`.
        timeout_s: Longest time that another node may take, in seconds.

    Raises:
        CrewError: They cannot be connected; names the addresses of both sides. Or a node is lost meanwhile.
    """

    def __init__(self, crew: Crew, address: str, timeout_s: float) -> None:
        self._crew, self._timeout_s = crew, timeout_s
        # torch's stubs lack these; it makes its own groups of them in the same way.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=max(LISTEN_S, timeout_s / _CONNECTS))
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            making = watched.begin(
                lambda: dist.ProcessGroupGloo(crew.open_store("gloo"), crew.index, len(crew), options)
            )
            while not making.done():  # it would wait for a store or a node that is gone, which others know by now
                if crew.is_broken.is_set():
                    raise CrewError(LOST)
                time.sleep(_POLL_S)
            group = making.result()
        except RuntimeError as error:
            raise CrewError(f"{error}; this node's address is {address}") from error
        group._set_default_timeout(clock.OUTLASTS_ALL)
        self._group = group

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> None:
        """Send bytes to all nodes, and receive those of each.

        Args:
            mine: Bytes of this node, uint8[n].
            everyones: Memory for the bytes of all nodes, uint8[nodes, n], which is filled.

        Raises:
            CrewError: A node is gone, or has not taken part in time: `Crew.explain` names it.
        """
        try:
            # As dist.all_gather_into_tensor does: the list of allgather() would be copied from memory of its own.
            work = self._group._allgather_base(everyones.view(-1), mine)  # type: ignore[attr-defined]
            begun = clock.now()
            while not work.is_completed():
                if self._crew.is_broken.is_set():
                    raise TimeoutError(LOST)
                if clock.now() - begun > self._timeout_s:
                    raise TimeoutError(f"nothing came for {self._timeout_s:g} s (timeout_s)")
                time.sleep(_POLL_S)
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            # gloo would wait for its threads when it is destroyed, and these wait for the other node.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise CrewError(str(error)) from error
