"""What ranks find out from each other before they begin: whether all have the same, and whether one has failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on all ranks what one rank raises in the block, ValueError or TypeError: the others would wait for it."""
    error = None
    try:
        yield
    except (TypeError, ValueError) as caught:
        error = caught
    messages = _gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")


def num_ranks() -> int:
    """Return the number of ranks: 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(value: object) -> list[Any]:
    """Return the values of all ranks, which JSON can hold."""
    if num_ranks() == 1:
        return [value]
    # As all_gather_object does, which would unpickle what others send: that may run code.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded)
    return [json.loads(bytes(its[: int(size)].cpu().numpy())) for its, size in zip(everyones, sizes, strict=True)]


def require_same(values: Mapping[str, object]) -> None:
    """Raise ValueError on every rank where the values are not the same on all ranks."""
    by_rank = _gather({name: str(value) for name, value in values.items()})
    for rank, others in enumerate(by_rank):
        for name in by_rank[0] | others:
            first, other = by_rank[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{name}: {first} on rank 0, and {other} on rank {rank}; ranks must have the same")
