"""Run by test_ranks on each rank, and alone in its own process: one training, with each way to distribute K-FAC.

Arguments: "quick" or "all" ways; file to write, of {way: {"weights": …, "cosines": …, "memory": …, "bytes": …}}; file
with the same of one rank alone. A way's first word names a training: all ways of one training end alike.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from datapipe.cluster import rank_placement
from trainer.kfac import EKFAC, KFAC, AdaptiveDamping, reduce_to_owners
from trainer.ranks.connection import connected, leave

BATCH, STEPS, SAVED_AT, BROKEN_AT = 24, 4, 2, 2  # factors change in steps 0 and 2, solutions in 0 and 3
SETTINGS = {"damping": 0.1, "factor_update_steps": 2, "inv_update_steps": 3, "lr": 0.05}
# What every run of the tests trains on four ranks.
QUICK = {f"{kind} {fraction}" for kind in ("eigen", "eigen-bytes") for fraction in ("0.25", "0.50", "1.00")}
QUICK |= {"cholesky 0.50", "cholesky-bytes 0.50", "eigen 0.50 accumulated", "eigen-bfloat16-bytes 0.50"}
QUICK |= {"uncorrelated-bytes 0.50", "eigen owners", "eigen owners, accumulated", "eigen resumed from one rank"}
QUICK |= {"broken", "adaptive, owners", "ekfac-local", "local"}
EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1, "steps": 2}


class Network(nn.Module):
    """Has each type of layer except batch normalisation, whose statistics are those of a rank's part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8), nn.Conv2d(8, 6, 1), nn.Flatten(),
        )  # fmt: skip
        self.embedding, self.line = nn.Embedding(5, 6), nn.Conv1d(6, 4, 3, stride=2)
        self.head = nn.Sequential(nn.Linear(6 * 36 + 4 * 2, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.embedding((x[:, 0, 0] + 2.5).clamp(0, 4).long())
        return self.head(torch.cat([self.image(x), self.line(words.mT).flatten(1)], 1))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Network().to(dtype)


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
    owners: bool = False,
    states: list[dict] | None = None,
    resumed: bool = False,
    adaptive: bool = False,
    compiled: bool = False,
    broken: bool = False,
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
    kind: type[KFAC] = KFAC,
    **settings: object,
) -> dict:
    """Train, and return what was learnt.

    `resumed`: at SAVED_AT, from the states of all ranks, or `states`. `broken`: one sample of a step is not finite,
    and the optimizer leaves that step out.
    """
    module = network(dtype)
    model = DistributedDataParallel(module) if world_size > 1 else module
    if compiled:
        module.compile(backend="aot_eager")
    preconditioner = kind(model, **SETTINGS | settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if owners and world_size > 1:
        reduce_to_owners(model, preconditioner)
    rule = AdaptiveDamping(preconditioner, damping_update_steps=2)
    parts, saved = settings.get("accumulation_steps", 1), None
    for step in range(steps):
        if resumed and step == SAVED_AT:
            saved = [preconditioner.state_dict()]
            if world_size > 1:
                saved = [None] * world_size
                dist.all_gather_object(saved, preconditioner.state_dict())
            preconditioner.remove()
            preconditioner = kind(model, **SETTINGS | settings)
            preconditioner.load_state_dict(*states or saved)
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size, dtype)
        if broken and step == BROKEN_AT and rank == world_size - 1:
            x[-1] = float("inf")
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
        if not (broken and step == BROKEN_AT):
            optimizer.step()
        if adaptive:
            rule.end(lambda x=x, y=y: F.cross_entropy(module(x), y))
    result = {
        "damping": preconditioner.damping,
        "ratio": rule.ratio,
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "cosines": preconditioner.cosines(),
        "skipped": preconditioner.skipped(),
        "memory": preconditioner.memory_usage(),
        "bytes": preconditioner.communication(),
        "owners": preconditioner.layers(),
        "state": preconditioner.state_dict(),
        "saved": saved,
    }
    preconditioner.remove()
    return result


def ways(P: int, alone: dict | None) -> dict[str, dict]:
    """Return the arguments of `train`, by the name of the way."""
    fractions = {f"{n / P:.2f}": {"grad_worker_fraction": n / P} for n in range(1, P + 1) if P % n == 0}
    least, twice = {"grad_worker_fraction": 1 / P}, {"accumulation_steps": 2}
    found = {}
    for name, of in fractions.items():
        for solver in ("eigen", "cholesky"):
            found[f"{solver} {name}"] = {"solver": solver, **of}
            found[f"{solver} {name} accumulated"] = {"solver": solver, **of, **twice}
            found[f"{solver}-float32 {name}"] = {"solver": solver, **of, "dtype": torch.float32, "steps": 2}
        for solver in ("eigen", "cholesky"):
            found[f"{solver}-bytes {name}"] = {"solver": solver, **of, **EVERY_STEP}
            found[f"{solver}-bfloat16-bytes {name}"] = {
                "solver": solver, **of, **EVERY_STEP, "inv_dtype": "bfloat16", "dtype": torch.float32,
            }  # fmt: skip
        found[f"uncorrelated-bytes {name}"] = {"spatially_uncorrelated": True, **of, **EVERY_STEP}
    for solver in ("eigen", "cholesky"):
        found[f"{solver} owners"] = {"solver": solver, "owners": True, **least}
    return found | {
        "eigen owners, accumulated": {"owners": True, **least, **twice},
        "eigen resumed": {"resumed": True, **least},
        "eigen resumed from one rank": {"resumed": True, **least, "states": alone and alone["eigen resumed"]["saved"]},
        "eigen compiled": {"compiled": True, **twice},
        "broken 1.00": {"broken": True},
        "broken": {"broken": True, **least},
        "adaptive 1.00": {"adaptive": True},
        "adaptive": {"adaptive": True, **least},
        "adaptive, owners": {"adaptive": True, "owners": True, **least},
        "ekfac-local": {"kind": EKFAC, "local_factors": True, **least},
        "local": {"local_factors": True, **least},
    }


if __name__ == "__main__":
    found = {}
    with connected(rank_placement(os.environ)) as world:
        P = world.world_size
        _, which, path, path_alone = sys.argv
        for way, options in ways(P, torch.load(path_alone, weights_only=True)).items():
            if way not in QUICK if which == "quick" else way == "eigen compiled" and P > 2:
                continue
            found[way] = train(world.rank, P, **options)
        for way, result in found.items():  # the same to the bit on all ranks
            weights = torch.cat([value.flatten() for value in result["weights"].values()])
            others = [torch.empty_like(weights) for _ in range(P)]
            dist.all_gather(others, weights)
            assert all(torch.equal(weights, other) for other in others), way
        gathered = [None] * P
        dist.all_gather_object(gathered, found)
        for way, result in found.items():
            for what in ("memory", "bytes", "state", "skipped"):
                result[what] = [of_rank[way][what] for of_rank in gathered]
        if world.is_main:
            torch.save(found, Path(path))
    leave(0)
