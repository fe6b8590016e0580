"""In place of DDP's all-reduce: each layer's gradient is reduced to its owner, which preconditions it and sends the
result to all. That takes as many bytes as the all-reduce (which is a reduction and a broadcast, too), and of gradients
K-FAC sends nothing besides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .communication import Part, unpack
from .preconditioner import KFAC
from .registration import unwrapped


def reduce_to_owners(model: DistributedDataParallel, preconditioner: KFAC) -> None:
    """Register a communication hook with DDP, for a `preconditioner` of this model with one worker a layer.

    Until `preconditioner.step()` the gradients of layers are then parts of a sum, on all but their owner: what looks at
    gradients, such as clipping, comes after it, and of several micro-batches all but the last are under `no_sync`:
    else the second backward pass raises RuntimeError.

    Raises ValueError when `grad_worker_fraction` is not 1 / world size, with a gradient scaler (which looks at them
    before), for a model that is not in DDP, and for the preconditioner of another model or of other ranks. DDP takes
    one hook: for another preconditioner wrap the model anew.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model: a {type(model).__name__}; allowed: DistributedDataParallel")
    if unwrapped(model) is not preconditioner.model:
        raise ValueError("preconditioner: it is that of another model")
    world_size = dist.get_world_size()
    if dist.get_world_size(model.process_group) != world_size:
        raise ValueError("model: DistributedDataParallel has a process_group of its own")
    if preconditioner.scales_gradients():
        raise ValueError("grad_scaler: it looks for overflows before step(), in gradients that only their owner has")
    if round(preconditioner.grad_worker_fraction * world_size) != 1:
        raise ValueError(
            f"grad_worker_fraction: with {preconditioner.grad_worker_fraction} several ranks precondition a layer; "
            f"allowed here: 1/{world_size}"
        )
    owners = {}
    for name, owner in preconditioner.layers().items():
        if owner >= 0:
            owners |= {parameter: owner for parameter in preconditioner.parameters(name)}
    group = model.process_group
    model.register_comm_hook(None, lambda _, bucket: _reduce(bucket, owners, preconditioner, group))
    preconditioner.gradients_at_owners = True


def _reduce(
    bucket: dist.GradBucket, owners: dict[nn.Parameter, int], preconditioner: KFAC, group: dist.ProcessGroup
) -> torch.futures.Future[Tensor]:
    """What has no owner, or none any more, is reduced to all."""
    exchange = preconditioner.exchange
    if preconditioner.gradients_at_owners:
        if bucket.index() in preconditioner.reduced:
            raise RuntimeError(
                "reduce_to_owners: gradients are reduced a second time since step(), to which ranks had added parts "
                "of sums: of several micro-batches all but the last are under no_sync(), and discard() comes after a "
                "backward pass that no step() follows"
            )
        preconditioner.reduced.add(bucket.index())
    buffer = bucket.buffer().div_(exchange.world_size)
    exchange.bytes_sent["reduced"] += buffer.nbytes
    by_owner: dict[int, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        owner = owners.get(parameter, -1) if preconditioner.gradients_at_owners else -1
        by_owner.setdefault(owner, []).append(gradient)
    reducing = []
    for owner, gradients in by_owner.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if owner < 0:
            work = dist.all_reduce(flat, group=group, async_op=True)
        else:
            work = dist.reduce(flat, owner, group=group, async_op=True)
        reducing.append((work, flat, gradients if owner in (-1, exchange.rank) else []))

    def finish(last: torch.futures.Future) -> Tensor:
        last.value()  # or its error
        for work, _, _ in reducing[:-1]:
            work.wait()  # on a GPU the stream does, not the host
        for _, flat, gradients in reducing:
            if flat.is_cuda:
                flat.record_stream(torch.cuda.current_stream())  # which is not that of the backward pass
            unpack(flat, [Part(gradient) for gradient in gradients])
        return buffer

    # Not torch.futures.collect_all: what follows that waits for no stream, and NCCL's works end when they are queued.
    return reducing[-1][0].get_future().then(finish)
