"""Whether all ranks have the same before them: at the start, and while they train."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from datapipe.loaders.native_pixels import choose_native

from ..config.recipe import Recipe
from ..errors import TrainingError
from ..reporting.metrics import versions
from .device import explain_unlike
from .world import World, gather_everywhere


def check_setup(world: World, recipe: Recipe, data_sets: Mapping[str, str]) -> None:
    """Compare what the ranks build their networks from; all ranks must call this.

    Args:
        world: This process's place among the ranks.
        recipe: The recipe of the run.
        data_sets: Identity of each data set, by name.

    Raises:
        TrainingError: A rank has another data set, such as an old copy on its node, other versions of the software, or
            another recipe than the first one; names it, and its host. All ranks raise this.
    """
    native = choose_native().native  # where one rank has none, it loads more slowly: its node was set up differently
    software = {**versions(), "decoder in C": f"version {native.version}" if native else "none"}
    setup = {"recipe": recipe.model_dump(mode="json"), "data set": dict(data_sets), "versions": software}
    _compare(world, setup)


def check_start(world: World, module: nn.Module) -> None:
    """Do what `check_setup` does, with the parameters that the ranks begin with."""
    if world.world_size > 1:
        _compare(world, {"initial parameters": parameter_digest(module)})


def _compare(world: World, setup: dict[str, Any]) -> None:
    if world.world_size == 1:
        return
    first, *others = gather_everywhere(world, setup)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                difference = _where_different(other[name], value)
                hosts = world.host_of[rank], world.host_of[0]
                message = f"rank {rank} ({hosts[0]}) has another {name} than rank 0 ({hosts[1]}): {difference}"
                raise TrainingError(message.replace("another versions", "other versions"))


def _where_different(value: Any, expected: Any, path: str = "") -> str:
    """Return the first parts in which two values differ, in words."""
    if isinstance(value, dict) and isinstance(expected, dict):
        for key in {**expected, **value}:
            if value.get(key) != expected.get(key):
                return _where_different(value.get(key), expected.get(key), f"{path}.{key}" if path else str(key))
    return f"{path} {value}".strip() + f", not {expected}"


@torch.no_grad()
def check_replicas(world: World, module: nn.Module, step: int) -> None:
    """Compare the parameters of all ranks, to the bit; all ranks must call this.

    Args:
        world: This process's place among the ranks.
        module: The network.
        step: Number of the last step, for the message.

    Raises:
        TrainingError: They differ, as where a rank's memory has lost a bit; names the rank. All ranks raise this.
    """
    if world.world_size == 1:
        return
    names, parameters = zip(*module.named_parameters(), strict=True)
    sums = gather_everywhere(world, torch.stack([*map(_sum_bits, parameters)]).tolist())
    (common, count), *_ = Counter(map(tuple, sums)).most_common(1)
    wrong = [rank for rank, values in enumerate(sums) if tuple(values) != common]
    if not wrong:
        return
    if 2 * count <= world.world_size:  # which of them are right is not known
        wrong = [*range(world.world_size)]
    name = next(name for name, *values in zip(names, *sums, strict=True) if len({*values}) > 1)
    who = ", ".join(f"rank {rank} ({world.host_of[rank]})" for rank in wrong)
    message = f"{who}: other parameters than the other ranks after step {step}, first in {name}"
    if unlike := explain_unlike(world.devices):
        message += f"; {unlike}: they may round differently. --resume continues from before, on devices of one kind"
    else:
        message += ". Its memory or GPU may be damaged; --resume continues from before, on other nodes"
    raise TrainingError(message)


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements, taken for whole numbers, modulo 2⁶⁴: no changed bit leaves it as it is."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().flatten().view(whole).sum(dtype=torch.int64)


@torch.no_grad()
def parameter_digest(module: nn.Module) -> str:
    """Return a digest of all parameters and buffers, to the bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
