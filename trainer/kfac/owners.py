"""In place of DDP's all-reduce: each layer's gradient is reduced to its owner, which preconditions it and sends the
result to all. That takes as many bytes as the all-reduce (which is a reduction and a broadcast, too), and K-FAC sends
nothing besides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .exchange import Exchange, Part, unpack
from .preconditioner import KFAC, unwrapped


def reduce_to_owners(model: DistributedDataParallel, preconditioner: KFAC) -> None:
    """Register a communication hook with DDP, for a `preconditioner` of this model with one worker a layer.

    Until `preconditioner.step()` the gradients of layers are then those of the rank alone, on all but their owner, so
    that what looks at gradients, such as clipping, comes after it. Raises ValueError when `grad_worker_fraction` is not
    1 / world size, and for the preconditioner of another model.
    """
    if unwrapped(model) is not preconditioner.model:
        raise ValueError("preconditioner: it is that of another model")
    world_size = dist.get_world_size()
    if round(preconditioner.grad_worker_fraction * world_size) != 1:
        raise ValueError(
            f"grad_worker_fraction: with {preconditioner.grad_worker_fraction} several ranks precondition a layer; "
            f"allowed here: 1/{world_size}"
        )
    owners = {}
    for name, owner in preconditioner.layers().items():
        if owner >= 0:
            owners |= {parameter: owner for parameter in preconditioner.parameters(name)}
    preconditioner.gradients_at_owners = True
    model.register_comm_hook(None, lambda _, bucket: _reduce(bucket, owners, preconditioner.exchange))


def _reduce(
    bucket: dist.GradBucket, owners: dict[nn.Parameter, int], exchange: Exchange
) -> torch.futures.Future[Tensor]:
    """What has no owner is reduced to all."""
    buffer = bucket.buffer().div_(exchange.world_size)
    exchange.bytes_sent["reduced"] += buffer.nbytes
    by_owner: dict[int, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        by_owner.setdefault(owners.get(parameter, -1), []).append(gradient)
    reducing = []
    for owner, gradients in by_owner.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = dist.all_reduce(flat, async_op=True) if owner < 0 else dist.reduce(flat, owner, async_op=True)
        reducing.append((work, flat, gradients if owner in (-1, exchange.rank) else []))

    def finish(_: object) -> Tensor:
        for _, flat, gradients in reducing:
            unpack(flat, [Part(gradient) for gradient in gradients])
        return buffer

    return torch.futures.collect_all([work.get_future() for work, _, _ in reducing]).then(finish)
