"""The key-value store (torch's TCPStore) at which the processes of a job meet."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..cluster import Placement
from ..errors import StagingError


class CrewError(StagingError):
    """The nodes cannot continue together; each can alone."""


class LeftError(CrewError):
    """Another process has left, and says why."""


def connect_store(placement: Placement, is_first: bool, timeout_s: float) -> dist.Store:
    """Connect to the store, which process 0 keeps from its first connection on, unless torchrun does.

    Args:
        placement: of this process.
        is_first: whether this is the process's first connection.
        timeout_s: how long process 0 may take to come, in seconds.

    Returns:
        The store.

    Raises:
        CrewError: it does not come, or cannot listen there.
    """
    is_keeper = is_first and placement.rank == 0 and not placement.has_store
    try:
        place, limit = (placement.master, placement.port), timedelta(seconds=timeout_s)
        return dist.TCPStore(*place, is_master=is_keeper, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        what = "cannot listen" if is_keeper else "process 0 does not answer"
        raise CrewError(f"{placement.master}:{placement.port}: {what}: {error}") from error
