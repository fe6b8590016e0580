"""Run by test_kfac_ranks, alone and under torchrun: the same training with each way to distribute K-FAC.

Arguments: file to write, of {way: {"weights": …, "cosines": …, "memory": …, "bytes": …}}.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import connected, world_from_environment
from trainer.kfac import EKFAC, KFAC, AdaptiveDamping, reduce_to_owners

BATCH, STEPS, SAVED_AT = 12, 7, 4
SETTINGS = {"damping": 0.1, "factor_update_steps": 2, "inv_update_steps": 3, "lr": 0.05}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.Conv2d(8, 6, 1), nn.Flatten(),
        nn.Linear(6 * 36, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4),
    )  # fmt: skip
    return module.to(dtype)


def batch(step: int, rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 3, 6, 6, generator=generator).to(dtype)
    y = torch.randint(4, (BATCH,), generator=generator)
    share = BATCH // world_size
    mine = slice(rank * share, (rank + 1) * share)
    return x[mine], y[mine]


def train(
    rank: int,
    world_size: int,
    owners=False,
    resumed=False,
    adaptive=False,
    dtype=torch.float64,
    steps=STEPS,
    kind=KFAC,
    **settings,
) -> dict:
    module = network(dtype)
    model = DistributedDataParallel(module) if world_size > 1 else module
    preconditioner = kind(model, **SETTINGS | settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if owners and world_size > 1:
        reduce_to_owners(model, preconditioner)
    rule = AdaptiveDamping(preconditioner, damping_update_steps=2)
    parts = settings.get("accumulation_steps", 1)
    for step in range(steps):
        if resumed and step == SAVED_AT:
            states = [preconditioner.state_dict()]
            if world_size > 1:
                states = [None] * world_size
                dist.all_gather_object(states, preconditioner.state_dict())
            preconditioner.remove()
            preconditioner = kind(model, **SETTINGS | settings)
            preconditioner.load_state_dict(*states)
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size, dtype)
        loss = 0
        for i, (part_x, part_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            last = i == parts - 1
            with model.no_sync() if world_size > 1 and not last else torch.enable_grad():
                part_loss = F.cross_entropy(model(part_x), part_y) / parts
                part_loss.backward()
                loss = loss + part_loss.detach()
        if adaptive:
            rule.begin(loss)
        preconditioner.step()
        optimizer.step()
        if adaptive:
            rule.end(lambda x=x, y=y: F.cross_entropy(module(x), y))
    return {
        "damping": preconditioner.damping,
        "ratio": rule.ratio,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "cosines": preconditioner.cosines(),
        "memory": preconditioner.memory_usage(),
        "bytes": preconditioner.communication(),
        "owners": preconditioner.layers(),
        "state": preconditioner.state_dict(),
    }


world = world_from_environment()
torch.set_num_threads(1)
found = {}
with connected(world):
    P, place = world.world_size, (world.rank, world.world_size)
    fractions = [n / P for n in range(1, P + 1) if P % n == 0]
    for solver in ("eigen", "cholesky"):
        for fraction in fractions:
            found[f"{solver} bytes {fraction:.2f}"] = train(
                *place, steps=2, solver=solver, grad_worker_fraction=fraction, factor_update_steps=1, inv_update_steps=1
            )
            found[f"{solver} {fraction:.2f}"] = train(*place, solver=solver, grad_worker_fraction=fraction)
        found[f"{solver}-float32 {1 / P:.2f}"] = train(
            *place, dtype=torch.float32, steps=2, solver=solver, grad_worker_fraction=1 / P
        )
        found[f"{solver} owners"] = train(*place, owners=True, solver=solver, grad_worker_fraction=1 / P)
    for fraction in fractions:
        found[f"uncorrelated bytes {fraction:.2f}"] = train(
            *place, steps=2, spatially_uncorrelated=True, grad_worker_fraction=fraction, factor_update_steps=1,
            inv_update_steps=1,
        )  # fmt: skip
    for solver in ("eigen", "cholesky"):
        for fraction in fractions:
            found[f"{solver} bfloat16 bytes {fraction:.2f}"] = train(
                *place, dtype=torch.float32, steps=2, solver=solver, inv_dtype="bfloat16",
                grad_worker_fraction=fraction, factor_update_steps=1, inv_update_steps=1,
            )  # fmt: skip
    found["eigen adaptive"] = train(*place, adaptive=True, grad_worker_fraction=1 / P)
    found["eigen adaptive, owners"] = train(*place, adaptive=True, owners=True, grad_worker_fraction=1 / P)
    found["eigen resumed"] = train(*place, resumed=True, grad_worker_fraction=1 / P)
    if BATCH // P % 2 == 0:
        found["eigen accumulated"] = train(*place, accumulation_steps=2)
        found["eigen accumulated, owners"] = train(
            *place, owners=True, accumulation_steps=2, grad_worker_fraction=1 / P
        )
    found["ekfac local"] = train(*place, kind=EKFAC, local_factors=True, grad_worker_fraction=1 / P)
    found["local"] = train(*place, local_factors=True, grad_worker_fraction=1 / P)
    if P > 1:
        for way, result in found.items():  # the same to the bit on all ranks
            weights = torch.cat([value.flatten() for value in result["weights"].values()])
            others = [torch.empty_like(weights) for _ in range(P)]
            dist.all_gather(others, weights)
            assert all(torch.equal(weights, other) for other in others), way
        gathered = [None] * P
        dist.all_gather_object(gathered, found)
        for way, result in found.items():
            for what in ("memory", "bytes", "state"):
                result[what] = [of_rank[way][what] for of_rank in gathered]
    if world.is_main:
        torch.save(found, Path(sys.argv[1]))
