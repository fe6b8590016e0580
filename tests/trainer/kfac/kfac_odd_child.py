"""Run by test_kfac_ranks under torchrun: two ranks that do not use the same layers, or have other settings.

Arguments: file to write.
"""

import os
import sys
from itertools import permutations
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from datapipe.cluster import rank_placement
from trainer.kfac import EKFAC, KFAC, AdaptiveDamping, reduce_to_owners
from trainer.ranks.connection import connected, leave


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branches: list[str]) -> torch.Tensor:
        for name in branches:
            x = getattr(self, name)(x).tanh()
        return x


def alike(module: nn.Module, gradients: bool = False) -> bool:
    tensors = [p.grad if gradients else p for p in module.parameters()]
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return all(torch.equal(mine, other) for other in all_ranks)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)


def a_factor(preconditioner: KFAC, name: str) -> torch.Tensor:
    """Return a layer's a_factor, which the rank that owns it sends to all."""
    mine = preconditioner.factors(name)
    a = mine[0][0].clone() if mine else torch.zeros(5, 5, dtype=torch.float64)
    dist.all_reduce(a)
    return a


class NotedCalls(TorchDispatchMode):
    """Notes each collective that is begun, DDP's too: its name, and its elements, if all ranks give as many."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            name, num_elements = function.overloadpacket.__name__, sum(tensor.numel() for tensor in tensors)
            self.calls.append((name, 0 if name == "alltoall_base_" else num_elements))
        return function(*arguments, **(options or {}))


def same_calls(rank: int, owners: bool) -> bool:
    """Do the ranks begin the same collectives in the same order, where they use other layers in another order?

    Of NCCL, two that were begun in another order could wait for each other.
    """
    module = Branches().double()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    preconditioner = KFAC(model, factor_update_steps=1, inv_update_steps=1, grad_worker_fraction=0.5)
    if owners:
        reduce_to_owners(model, preconditioner)
    with NotedCalls() as noted:
        for step, branches in enumerate(permutations(["both", "first", "second"])):
            mine = branches[rank:] if step % 2 else branches[:: 1 - 2 * rank]
            model(data(step, rank), [*mine]).square().sum(1).mean().backward()
            preconditioner.step()
            module.zero_grad()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, noted.calls)
    preconditioner.remove()
    return len(noted.calls) > 20 and all(calls == noted.calls for calls in everyones)


def different_layers(rank: int, fraction: float, owners: bool) -> dict:
    """The first step uses all; then rank 0 uses `first` and `both`, and rank 1 `both` and `second`, in that order."""
    module = Branches().double()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    preconditioner = KFAC(
        model, damping=0.1, factor_update_steps=1, inv_update_steps=1, factor_decay=0.0, grad_worker_fraction=fraction
    )
    if owners:
        reduce_to_owners(model, preconditioner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:  # a backward pass that counts for nothing, of which a rank has more to send than the other
            model(data(9, rank), ["both", "first", "second"][rank:]).sum().backward()
            preconditioner.discard()
        optimizer.zero_grad()
        branches = ["both", "first", "second"] if step == 0 else [["first", "both"], ["both", "second"]][rank]
        model(data(step, rank), branches).square().sum(1).mean().backward()
        if step == 2:
            before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        preconditioner.step()
        optimizer.step()
    # The inputs of the last step, counted again.
    inputs = {"first": [data(2, 0)], "both": [data(2, 1)], "second": []}
    for name, into, x in (("first", "both", data(2, 0)), ("both", "second", data(2, 1))):
        inputs[into].append((x @ before[f"{name}.weight"].T + before[f"{name}.bias"]).tanh())
    factors = {}
    for name, rows in inputs.items():
        a = a_factor(preconditioner, name)
        ones = [torch.cat([row, row.new_ones(len(row), 1)], 1) for row in rows]
        factors[name] = (a, sum(row.T @ row / len(row) for row in ones) / len(ones))
    return {
        "alike": alike(module),
        "cosines": preconditioner.cosines(),
        "factors": factors,
        "reduced": preconditioner.communication()["reduced"],
    }


def never_seen(rank: int, owners: bool) -> torch.Tensor:
    """Return the gradients of layers in evaluation mode, which K-FAC does not see."""
    module = Branches().double()
    module.both.eval()
    model = DistributedDataParallel(module)
    preconditioner = KFAC(model, grad_worker_fraction=0.5, kl_clip=None)
    if owners:
        reduce_to_owners(model, preconditioner)
    module.both.eval()
    model(data(0, rank), ["both", "first", "second"]).square().sum(1).mean().backward()
    preconditioner.step()
    assert alike(module, gradients=True) and preconditioner.cosines().keys() == {"first", "second"}
    return module.both.weight.grad


def without_no_sync(rank: int) -> str:
    """The second of two micro-batches would reduce what has been reduced, and raises; the next step is a new start."""
    model = DistributedDataParallel(Branches().double())
    preconditioner = KFAC(model, grad_worker_fraction=0.5, accumulation_steps=2)
    reduce_to_owners(model, preconditioner)
    branches = ["both", "first", "second"]
    for step in range(2):
        with model.no_sync():
            model(data(step, rank), branches).square().sum(1).mean().backward()
        model(data(step, rank), branches).square().sum(1).mean().backward()
        preconditioner.step()
    for _ in range(2):
        preconditioner.discard()
        model(data(3, rank), branches).square().sum(1).mean().backward()
    try:
        model(data(4, rank), branches).square().sum(1).mean().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def removed(rank: int) -> bool:
    """DDP's gradients are DDP's again, and a module frozen before DDP saw it is the same on all."""
    module = Branches().double()
    preconditioner = KFAC(module, grad_worker_fraction=0.5)
    module.both.bias.requires_grad_(False)
    model = DistributedDataParallel(module)
    reduce_to_owners(model, preconditioner)
    for step in range(2):
        if step == 1:
            preconditioner.remove()
        model.zero_grad()
        model(data(step, rank), ["both", "first", "second"]).square().sum(1).mean().backward()
        if step == 0:
            preconditioner.step()
            if "both" in preconditioner.cosines():
                return False
        module.both.bias.grad = torch.zeros(4, dtype=torch.float64)
        if not alike(module, gradients=True):
            return False
    return True


def expert(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the a_factor of a layer that has no samples on rank 0, and what it should be."""
    module = Branches().double()
    preconditioner = KFAC(module, skip="both|second", factor_update_steps=1)
    x = data(0, 1)[: 6 * rank]
    module(x, ["first"]).square().sum().backward()
    preconditioner.step()
    rows = torch.cat([data(0, 1), torch.ones(6, 1, dtype=torch.float64)], 1)
    return a_factor(preconditioner, "first"), rows.T @ rows / 6


def frozen_in_part(rank: int, owners: bool) -> float:
    """Return the ratio of adaptive damping, with a frozen layer that the second rank owns."""
    module = Branches().double()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    preconditioner = KFAC(model, grad_worker_fraction=0.5, factor_update_steps=1, inv_update_steps=1)
    if owners:
        reduce_to_owners(model, preconditioner)
    adaptive = AdaptiveDamping(preconditioner, 1)
    name = next(name for name, owner in preconditioner.layers().items() if owner == 1)
    getattr(module, name).bias.requires_grad_(False)
    x, branches = data(0, rank) * (1 + 9 * rank), ["both", "first", "second"]
    loss_of = lambda: model(x, branches).square().sum(1).mean()  # noqa: E731
    loss = loss_of()
    loss.backward()
    adaptive.begin(loss)
    preconditioner.step()
    torch.optim.SGD(module.parameters(), lr=0.05).step()
    adaptive.end(loss_of)
    preconditioner.remove()
    return adaptive.ratio


def refused_by_the_hook(other: bool = False, group: bool = False, **settings: object) -> str:
    groups = [dist.new_group([n]) for n in range(dist.get_world_size())] if group else None
    model = DistributedDataParallel(Branches(), process_group=groups and groups[dist.get_rank()])
    try:
        reduce_to_owners(model, KFAC(Branches() if other else model, **{"grad_worker_fraction": 0.5} | settings))
    except ValueError as error:
        return str(error)
    return "nothing"


def refused(kind: type[KFAC] = KFAC, **settings: object) -> str:
    """Return what the constructor says, which must have left nothing behind."""
    model = Branches()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        try:
            kind(model, **settings)
        except ValueError as error:
            assert not new_group.called
            assert not any(module._forward_hooks for module in model.modules())
            return str(error)
    return "nothing"


with connected(rank_placement(os.environ)) as world:
    rank = world.rank
    found = {
        "1.0": different_layers(rank, 1.0, False),
        "0.5": different_layers(rank, 0.5, False),
        "0.5, owners": different_layers(rank, 0.5, True),
        "bytes of gradients": 8 * 3 * (16 + 4),
        "never seen": {"0.5": never_seen(rank, False), "0.5, owners": never_seen(rank, True)},
        "removed": removed(rank),
        "without no_sync": without_no_sync(rank),
        "expert": expert(rank),
        "same calls": [same_calls(rank, owners) for owners in (False, True)],
        "frozen in part": [frozen_in_part(rank, owners) for owners in (False, True)],
        "refused": [
            refused(damping=0.1 + 0.1 * rank),
            refused(skip="both" if rank else ()),
            refused(grad_worker_fraction=1 - 0.5 * rank),
            refused(damping=-0.1 * rank + 0.05),
            refused(kind=EKFAC, local_factors=True),
            refused_by_the_hook(grad_scaler=torch.amp.GradScaler("cpu")),
            refused_by_the_hook(other=True),
            refused_by_the_hook(grad_worker_fraction=1.0),
            refused_by_the_hook(group=True),
        ],
    }
    if world.is_main:
        torch.save(found, Path(sys.argv[1]))
leave(0)
