"""The device of a rank, and its share of the node's cores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import torch

from datapipe.console import format_count
from datapipe.errors import SettingError
from datapipe.loaders.device import explain_unseen_gpus

from .world import World

_DEVICES = "auto", "cpu", "cuda"


def choose_device(device: str, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """Choose the device of a rank.

    A scheduler may show all GPUs of a node to each of its ranks, or to each its own alone.

    Args:
        device: "cuda" is a GPU, "cpu" the processor, "auto" a GPU where there are any.
        local_rank: The rank's number on its node.
        local_world_size: The number of ranks there.

    Returns:
        The device.

    Raises:
        SettingError: There is no GPU for "cuda", or the driver has GPUs that torch does not see for "auto": the run
            would train on the processor, for hours and unasked.
    """
    kind = _device_type(device)
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if 1 < count < local_world_size and local_world_size % count:
        raise SettingError(f"this node has {count} GPUs for {local_world_size} ranks; a rank needs one")
    return torch.device("cuda", local_rank % count)


def check_own_gpus(gpus: Sequence[tuple[str, str]]) -> None:
    """Raise SettingError where two ranks would share a GPU.

    Args:
        gpus: Name of the host of each rank, and what identifies its GPU, by rank; "" on the processor.
    """
    for rank, (host, gpu) in enumerate(gpus):
        first = gpus.index((host, gpu))
        if gpu and first < rank:
            raise SettingError(f"ranks {first} and {rank} would share a GPU of {host}; a rank needs one of its own")


def explain_unlike(devices: Sequence[str]) -> str:
    """Say which ranks have devices of which kind; "" where all have the same.

    Args:
        devices: Kind and model of each rank's device, by rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    if len(ranks) < 2:
        return ""
    each = (f"{device} on {format_count(len(some), 'rank')}, first {some[0]}" for device, some in ranks.items())
    return f"the ranks have devices of unlike kinds ({'; '.join(each)})"


def explain_idle(count: int) -> str:
    """Say how to use the GPUs that a single process leaves idle, of `count` that it sees; "" where there are none."""
    if count < 2:
        return ""
    use_all = f"torchrun --nproc-per-node {count} -m trainer train … trains on all of them"
    return f"{count - 1} of {count} GPUs stay idle, as this is a single process: {use_all}"


def _device_type(device: str) -> str:
    if device not in _DEVICES:
        raise SettingError(f"--device {device}: allowed: {', '.join(_DEVICES)}")
    if device == "cpu":
        return device
    if torch.cuda.is_available():
        return "cuda"
    unseen = explain_unseen_gpus()
    if unseen is not None:
        raise SettingError(f"--device {device}: {unseen}. Use --device cpu to train on the processor")
    if device == "cuda":
        raise SettingError("--device cuda: there is no GPU here; allowed: auto, cpu")
    return "cpu"


def set_threads(world: World, environ: Mapping[str, str] = os.environ) -> None:
    """Let torch use this rank's cores, unless OMP_NUM_THREADS says otherwise."""
    chosen = environ.get("OMP_NUM_THREADS")
    # With several ranks, torchrun itself sets 1 where nothing was chosen: too few on most nodes.
    if chosen and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environ and world.local_world_size > 1):
        return
    torch.set_num_threads(world.cores)


def share_cores(allowed: Sequence[Collection[int]], rank: int) -> tuple[int, int]:
    """Divide the cores of a host among its ranks, each of which may be bound to some of them.

    Args:
        allowed: Numbers of the cores that each rank of this host may use, by rank.
        rank: Number of the rank that asks, on this host.

    Returns:
        Number of cores that they may use together, and the share of this one: of a core that n may use, an n-th.
    """
    users = Counter(core for cores in allowed for core in cores)
    return len(users), max(1, int(sum(Fraction(1, users[core]) for core in allowed[rank])))
