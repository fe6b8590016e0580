"""Bytes from each node to all others by MPI, for networks that gloo can use only through their emulation of TCP."""

from __future__ import annotations

import logging
import time
from types import ModuleType

import torch

from .. import clock
from ..cluster import Placement
from ..errors import SettingError
from .group import Crew
from .store import CrewError

logger = logging.getLogger(__name__)

_POLL_S = 1e-4  # MPI moves bytes only while it is asked
_LOOK_S = 1.0  # how often to look whether a node has left


def load_mpi() -> ModuleType:
    """Return mpi4py's MPI, which begins with its first import. Raises SettingError where it cannot."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        message = f"transport: 'mpi' needs mpi4py and an MPI library ({error}): pip install 'datapipe-trainer[mpi]'"
        raise SettingError(message) from error
    return MPI


def find_mpi_problem(placement: Placement) -> SettingError | None:
    """Return why nodes cannot exchange by MPI: it is not here, or knows other processes; None if they can."""
    try:
        world = load_mpi().COMM_WORLD
    except SettingError as error:
        return error
    known, ours = (world.Get_rank(), world.Get_size()), (placement.rank, placement.world_size)
    if known != ours:
        names = "process {} of {}, and as {} tells process {} of {}".format(*known, placement.launcher, *ours)
        message = f"transport: for MPI this is {names}; start it by mpirun or srun --mpi=pmix, or use gloo"
        return SettingError(message)
    return None


class MpiGroup:
    """The connections between all nodes; processes that lead a node make it together.

    A node that fails ends the command on all: mpirun ends the others; where a launcher does not, they continue. A
    silent one ends all as well, since MPI itself could not end in any of them. To stage again continues.

    Args:
        crew: Processes of the job, and its nodes.
        timeout_s: Longest time that another node may take, in seconds.
    """

    def __init__(self, crew: Crew, timeout_s: float) -> None:
        self._crew, self._timeout_s = crew, timeout_s
        self._world = world = load_mpi().COMM_WORLD
        self._nodes = world.Create_group(world.Get_group().Incl(crew.leaders))

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> None:
        """Send bytes to all nodes, and receive those of each.

        Args:
            mine: Bytes of this node, uint8[n].
            everyones: Memory for the bytes of all nodes, uint8[nodes, n], which is filled.

        Raises:
            CrewError: A node has left; names it.
        """
        request = self._nodes.Iallgather(mine.numpy(), everyones.numpy())
        begun = looked = clock.now()
        while not request.Test():
            time.sleep(_POLL_S)
            if (now := clock.now()) - looked < _LOOK_S:
                continue
            looked = now
            if self._crew.find_left(self._crew.leaders):
                raise CrewError(self._crew.explain(TimeoutError("it has left")))
            if now - begun > self._timeout_s:
                reason = self._crew.explain(TimeoutError(f"nothing came for {self._timeout_s:g} s (timeout_s)"))
                logger.error("%s: with MPI, nobody can continue; stage again, and what is here stays", reason)
                self._world.Abort(1)
