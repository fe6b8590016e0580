"""Run by test_gpu on each of two ranks, which share one device: two_ranks.py DEVICE.

gloo takes tensors of a GPU as well, and lets both ranks use the same one, which NCCL refuses.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer import models
from trainer.kfac import KFAC, reduce_to_owners
from trainer.ranks.consistency import check_replicas
from trainer.ranks.world import World, wrap
from trainer.step.precision import choose_precision

SETTINGS = {"damping": 0.1, "factor_update_steps": 2, "inv_update_steps": 2, "solver": "cholesky"}


def make(world: World, **options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = models.build("resnet8", num_classes=10, in_channels=3)
    module.to(world.device, memory_format=torch.channels_last)
    return module, wrap(module, world, **options)


def batch(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * step + world.rank)
    images, labels = torch.randn(8, 3, 24, 24, generator=generator), torch.randint(10, (8,), generator=generator)
    return images.to(world.device, memory_format=torch.channels_last), labels.to(world.device)


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def check_gradients(world: World) -> None:
    """DDP's are the means over the ranks, also if bfloat16 is sent."""
    module, _ = make(World(device=world.device))
    x, y = batch(world, 0)
    F.cross_entropy(module(x), y).backward()
    wanted = gradients(module).cpu()
    dist.all_reduce(wanted)
    for options, tolerance in (({}, 1e-3), ({"gradient_dtype": "bfloat16"}, 2e-2)):
        module, model = make(world, **options)
        F.cross_entropy(model(x), y).backward()
        found = gradients(module).cpu()
        assert (found - wanted / 2).norm() <= tolerance * found.norm(), options


def train(world: World, owners: bool, states: dict | None, steps: range) -> tuple[nn.Module, dict]:
    """Train with K-FAC in mixed precision; return the network, and the states of the run at its end."""
    module, model = make(world)
    precision = choose_precision("bf16" if world.device.type == "cuda" else "off", world.device)
    preconditioner = KFAC(model, **SETTINGS, grad_worker_fraction=0.5 if owners else 1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if owners:
        reduce_to_owners(model, preconditioner)
    if states is not None:
        module.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        preconditioner.load_state_dict(*states["preconditioner"])
    for step in steps:
        x, y = batch(world, step)
        with precision.autocast():
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
        preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()
        check_replicas(world, module, step)
    everyones = [None] * 2
    dist.all_gather_object(everyones, preconditioner.state_dict())
    states = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "preconditioner": everyones}
    return module, copy.deepcopy(states)


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device(sys.argv[1], 0 if sys.argv[1] == "cuda" else None)
    world = World(rank, rank, 2, 2, device, ("here", "here"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:gloo" if device.type == "cuda" else "gloo")
    check_gradients(world)
    learnt = {}
    for owners in (False, True):
        _, states = train(world, owners, None, range(2))
        again, _ = train(world, owners, states, range(2, 4))
        through, _ = train(world, owners, None, range(4))
        learnt[owners] = [torch.cat([p.detach().flatten() for p in of.parameters()]) for of in (again, through)]
        assert (learnt[owners][0] - learnt[owners][1]).norm() <= 1e-3 * learnt[owners][1].norm()
    # Of the way that a step leads, not of the weights.
    start = torch.cat([p.detach().flatten() for p in make(World(device=device))[0].parameters()])
    ways = [learnt[owners][1] - start for owners in (False, True)]
    assert (ways[0] - ways[1]).norm() <= 0.05 * ways[0].norm()
    dist.destroy_process_group()


main()
