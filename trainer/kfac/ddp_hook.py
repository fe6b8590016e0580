"""A communication hook for DDP, in place of its all-reduce.

Each layer's gradient is reduced to its owner, which preconditions it and sends the result to all ranks. That takes as
many bytes as the all-reduce, which also is a reduction and a broadcast, and K-FAC sends no gradients in addition.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .communication import Message, unflatten_messages
from .preconditioner import KFAC
from .registration import unwrap


def reduce_to_owners(model: DistributedDataParallel, preconditioner: KFAC) -> None:
    """Register the communication hook with DDP.

    Until `preconditioner.step()`, a layer's gradient is then only a part of a sum, except on its owner. So whatever
    looks at gradients, such as clipping, comes after it. Of several micro-batches all except the last are under
    `no_sync`: otherwise the second backward pass raises RuntimeError. DDP takes one hook: for another preconditioner,
    wrap the model again.

    Args:
        model: The model in DDP, over all ranks.
        preconditioner: One for this model, with one gradient worker for each layer.

    Raises:
        ValueError: `grad_worker_fraction` is not 1 / world size, there is a gradient scaler (which looks at gradients
            before the step), the model is not in DDP, or the preconditioner is for another model or other ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model: a {type(model).__name__}; allowed: DistributedDataParallel")
    if unwrap(model) is not preconditioner.model:
        raise ValueError("preconditioner: it is that of another model")
    world_size = dist.get_world_size()
    if dist.get_world_size(model.process_group) != world_size:
        raise ValueError("model: DistributedDataParallel has a process_group of its own")
    if preconditioner.scales_gradients():
        raise ValueError("grad_scaler: it looks for overflows before step(), in gradients that only their owner has")
    fraction = preconditioner.settings.grad_worker_fraction
    if round(fraction * world_size) != 1:
        raise ValueError(
            f"grad_worker_fraction: with {fraction} several ranks precondition a layer; allowed here: 1/{world_size}"
        )
    owners: dict[Tensor, int] = {}
    for name, owner in preconditioner.layers().items():
        if owner >= 0:
            owners |= {parameter: owner for parameter in preconditioner.parameters(name)}
    group = model.process_group
    model.register_comm_hook(None, lambda _, bucket: _reduce(bucket, owners, preconditioner, group))
    preconditioner.gradients_at_owners = True


def _reduce(
    bucket: dist.GradBucket, owners: dict[Tensor, int], preconditioner: KFAC, group: dist.ProcessGroup
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket's gradients to their owners, and those without an owner to all ranks.

    Each rank gets an equal piece of each bucket; with the last bucket, the pieces of all go to the owners.

    If the preconditioner's `gradients_at_owners` is False, it has been removed, and DDP's all-reduce is left. The
    future is that of the bucket's buffer.
    """
    communicator = preconditioner.communicator
    buffer = bucket.buffer().div_(communicator.world_size)
    communicator.bytes_sent["reduced"] += buffer.nbytes
    if not preconditioner.gradients_at_owners:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        reduction: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return reduction
    _refuse_second_reduction(bucket, preconditioner)
    by_owner: dict[int | None, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        by_owner.setdefault(owners.get(parameter), []).append(gradient)

    def deliver(own: Tensor, shared: Tensor) -> None:
        for owner, flat in ((communicator.rank, own), (None, shared)):
            if owner in by_owner:
                unflatten_messages(flat, [*map(Message, by_owner[owner])])

    reduced = preconditioner.reduced
    reduced[bucket.index()] = communicator.begin_sum(by_owner, deliver, group)
    if bucket.is_last():
        communicator.finish_sums([some for some in reduced.values() if some is not None])
        reduced |= dict.fromkeys(reduced)  # whose memory is free again
    # What follows in this stream follows the last bucket.
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def _refuse_second_reduction(bucket: dist.GradBucket, preconditioner: KFAC) -> None:
    if bucket.index() in preconditioner.reduced:
        raise RuntimeError(
            "reduce_to_owners: gradients are reduced a second time since step(), to which ranks had added parts of "
            "sums: of several micro-batches all but the last are under no_sync(), and discard() comes after a backward "
            "pass that no step() follows"
        )
