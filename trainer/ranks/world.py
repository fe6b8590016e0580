"""Ranks: which of them this process is, and how they agree.

Whatever only one rank can find out (no such file, disk full, a signal) is made known to all of them before
the next collective operation, so that none waits for a rank that has ended.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from datapipe.errors import DatapipeError, SettingError
from datapipe.jobgroup.store import gather_bytes

from ..errors import TrainingError
from .heartbeat import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among `world_size` ranks.

    Attributes:
        rank: Its number.
        local_rank: Its number on its host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on its host.
        device: Device on which it computes.
        host_of: The name of each rank's host.
        host_cores: Processor cores of its host that the ranks there may use.
        cores: Its share of these.
        watch: Watch that notices when it, or another rank, does nothing any more.
        devices: The kind and model of each rank's device.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_of: tuple[str, ...] = ()
    host_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    watch: Watch = field(default_factory=Watch)
    devices: tuple[str, ...] = ()

    @property
    def is_main(self) -> bool:
        """Return whether this is the first rank, which writes the files."""
        return self.rank == 0

    def batch_size(self, global_batch_size: int) -> int:
        """Return the batch size per rank. Raises SettingError if the ranks cannot share the global one equally."""
        if global_batch_size % self.world_size:
            raise SettingError(
                f"train.batch_size = {global_batch_size}: must be a multiple of the world size, "
                f"{self.world_size}; unequal ranks would wait for each other forever at the end of an epoch"
            )
        return global_batch_size // self.world_size


def wrap(
    model: nn.Module,
    world: World,
    bucket_mib: int = 25,
    gradient_dtype: str = "float32",
    static_graph: bool = False,
    powersgd_rank: int | None = None,
    powersgd_start_step: int = 1000,
) -> nn.Module:
    """Return a model whose backward pass averages gradients over the ranks; on one rank, the model itself.

    Args:
        model: The network, on this rank's device.
        world: This process's place among the ranks.
        bucket_mib: Size of the parts in which gradients are sent, in MiB.
        gradient_dtype: Type in which they are sent: float32 or bfloat16.
        static_graph: Whether every step uses the same parameters, in the same order, of which DDP then makes use.
        powersgd_rank: Rank of the matrices that are sent in place of gradients; None: gradients are sent.
        powersgd_start_step: Backward passes after which that begins, at least 2.
    """
    if world.world_size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    # Running statistics are averaged where they matter (averaged_buffers), not sent before every step.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 renamed the option
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {option: False}
    options |= {"device_ids": devices, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket_mib}
    options["static_graph"] = static_graph
    wrapped = DistributedDataParallel(model, **options)
    if gradient_dtype == "bfloat16":
        wrapped.register_comm_hook(None, lambda _, bucket: _send_bfloat16(bucket))
    if powersgd_rank is not None:
        state = PowerSGDState(None, powersgd_rank, powersgd_start_step)
        wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def _send_bfloat16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients in bfloat16, as torch's own hook does, which only NCCL may use."""
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(sent))


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Return the element-wise sums over all ranks, in float64; every rank must give equally many `values`."""
    if world.world_size == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def broadcast(world: World, value: T) -> T:
    """Return the first rank's `value` on all ranks."""
    if world.world_size == 1:
        return value
    data = _pack(value) if world.is_main else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    if not world.is_main:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return value if world.is_main else _unpack(data)


def gather(world: World, value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return each rank's value on the first rank, None on the others.

    Args:
        world: This process's place among the ranks.
        value: This rank's value.
        group: Group of all ranks over which it is sent; None: the default one.
    """
    if world.world_size == 1:
        return [value]
    data = _pack(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group)
    if not world.is_main:
        dist.send(data, 0, group)
        return None
    values = [value]
    for rank, size in enumerate(sizes[1:], 1):  # in their own sizes: some may have much, and most little
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, rank, group)
        values.append(_unpack(received))
    return values


def gather_everywhere(world: World, value: T) -> list[T]:
    """Return each rank's value, on all ranks: what JSON can hold, so tuples become lists."""
    if world.world_size == 1:
        return [value]
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode())]


def _pack(value: object) -> Tensor:
    """Return as uint8[n] what checkpoints may hold: tensors, numbers, text, and lists, tuples and dicts of them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    """Return what `_pack` was given. Runs no code that another process may have sent."""
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TrainingError("another rank has sent what no rank sends: is a stranger connected?") from error


@contextmanager
def averaged_buffers(model: nn.Module, world: World) -> Iterator[dict[str, Tensor]]:
    """Give all ranks the mean of their BN running statistics for a block, so that all evaluate and save one network.

    Afterwards each has its own again: if they were rounded at each checkpoint, a run that was stopped, and so saved one
    more, would not end with the same bits.

    Yields:
        This rank's own, by name; where there is no other rank, none.
    """
    if world.world_size == 1:
        yield {}
        return
    buffers = _averaged(model)
    own = {name: buffer.clone() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        dist.all_reduce(buffer)
        buffer /= world.world_size
    try:
        yield own
    finally:
        set_buffers(model, own)


def set_buffers(model: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Give a model the running statistics that a rank had. Raises KeyError where it has others."""
    buffers = _averaged(model)
    for name, value in own.items():
        buffers[name].copy_(value)


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@contextmanager
def together(world: World) -> Iterator[None]:
    """Run the block; if it fails on any rank, raise on all of them, instead of waiting for the failed one.

    The failed rank raises its own error, the others a SettingError or TrainingError that quotes it.
    """
    failure: Exception | None = None
    try:
        yield
    except (DatapipeError, SettingError, OSError) as error:
        failure = error
    if world.world_size > 1:
        own = None if failure is None else (isinstance(failure, SettingError), str(failure))
        with world.watch.waiting():
            verdicts = gather_everywhere(world, own)
        if failure is None:
            for rank, verdict in enumerate(verdicts):
                if verdict is not None:
                    kind = SettingError if verdict[0] else TrainingError
                    raise kind(f"rank {rank}: {verdict[1]}")
    if failure is not None:
        raise failure
