"""The key-value store (torch's TCPStore) at which the processes of a job meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import clock, watched
from ..cluster import Placement
from ..errors import DatapipeError, OtherNodeError, StagingError

Answer = TypeVar("Answer")
_LOOK_S = 0.1


class CrewError(StagingError):
    """The nodes cannot continue together; each can alone."""


class UnreachableError(CrewError):
    """Nodes do not reach each other, as all of them know."""


class LeftError(CrewError, OtherNodeError):
    """Another process has left, and says why."""


def ask(question: Callable[[], Answer], limit_s: float) -> Answer:
    """Call a function that asks a store, which may hang with the process that keeps it.

    Args:
        question: Function that is called in a thread; again, if it failed while this process was stopped for a while:
            the store has time limits of its own, and its clock runs on.
        limit_s: Longest time that it may take, in seconds.

    Returns:
        Result of the function.

    Raises:
        DatapipeError: It takes longer, or the function has raised CrewError.
        RuntimeError: The store is gone.
    """

    def call() -> Answer:
        while True:
            lost_s = clock.lost_s()
            try:
                return question()
            except (RuntimeError, CrewError):
                if clock.lost_s() <= lost_s:
                    raise

    return watched.call(call, limit_s, "the store of the job", "a question", is_quiet=True)


def connect_store(placement: Placement, is_first: bool, timeout_s: float, option: str = "timeout_s") -> dist.Store:
    """Connect to the store, which process 0 keeps from its first connection on, unless torchrun does.

    Args:
        placement: Placement of this process.
        is_first: Whether this is the process's first connection.
        timeout_s: Longest time that process 0 may take to come, in seconds.
        option: Option by which a user sets that, for messages.

    Returns:
        The store.

    Raises:
        CrewError: It does not come, or cannot listen there.
    """
    is_keeper = is_first and placement.rank == 0 and not placement.has_store
    place, limit = (placement.master, placement.port), timedelta(seconds=timeout_s)
    if not is_keeper:
        _wait_for(place, timeout_s, option)
    name = Path(f"{placement.master}:{placement.port}")
    try:  # who listens there may be another program, which does not answer
        return watched.call(
            lambda: dist.TCPStore(*place, is_master=is_keeper, timeout=limit, wait_for_workers=False), timeout_s, name
        )
    except RuntimeError as error:
        what = "cannot listen, as another job may do there: set another MASTER_PORT for all processes of this one"
        raise CrewError(f"{name}: {what if is_keeper else 'process 0 does not answer'}: {error}") from error
    except DatapipeError as error:
        what = f"what listens there is not process 0, or does not answer within {timeout_s:g} s ({option})"
        raise CrewError(f"{name}: {what}") from error


def gather_bytes(data: bytes) -> list[bytes]:
    """Return what each rank of torch's default group gives, on all ranks; they must call this together.

    Nothing is unpickled, as by `all_gather_object`, whose answers may run code.

    Args:
        data: This rank's, not empty.

    Returns:
        Those of all, by rank.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    count, own = dist.get_world_size(), torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(everyones, padded)
    return [bytes(its[: int(size)].cpu().numpy()) for its, size in zip(everyones, sizes, strict=True)]


def _wait_for(place: tuple[str, int], timeout_s: float, option: str) -> None:
    """Wait until somebody listens at a host's port. The store would do that, too, for twice as long, and less clearly.

    Raises CrewError.
    """
    deadline = clock.now() + timeout_s
    while True:
        try:
            socket.create_connection(place, timeout=max(_LOOK_S, deadline - clock.now())).close()
            return
        except OSError as error:
            if clock.now() > deadline - _LOOK_S:
                what = f"process 0 does not answer within {timeout_s:g} s ({option}): {error.strerror or error}"
                raise CrewError(f"{place[0]}:{place[1]}: {what}") from error
            time.sleep(_LOOK_S)
