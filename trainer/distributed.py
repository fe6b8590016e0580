"""Ranks: which of them this process is, and how they agree.

Whatever only one rank can find out (no such file, disk full, a signal) is made known to all of them before
the next collective operation, so that none waits for a rank that has ended.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Import this now, while no process group exists: its functions capture the default group as a default argument, and DDP
# would import it after init_process_group. The group, and gloo's threads, would then live until the interpreter shuts
# down, where a thread that frees a tensor aborts a process that has finished its work.
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from datapipe.errors import DatapipeError, SettingError
from datapipe.loaders.device import explain_unseen_gpus

from .errors import TrainingError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Longer than a checkpoint takes on a loaded filesystem; the launcher notices sooner that a rank has ended.
TIMEOUT = timedelta(minutes=30)

DEVICES = "auto", "cpu", "cuda"


@dataclass(frozen=True)
class World:
    """This process's place among `world_size` ranks, as `torchrun` numbers them."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

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


def world_from_environment(environ: Mapping[str, str] = os.environ, device: str = "auto") -> World:
    """Return the World that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe: one rank if they are not set.

    Args:
        environ: The environment variables.
        device: "cuda" is the GPU numbered LOCAL_RANK, "cpu" the processor, "auto" a GPU where there are any.

    Raises:
        SettingError: Some of the variables are set and others are not, a node has fewer GPUs than ranks, there is no
            GPU for "cuda", or the driver has GPUs that torch does not see for "auto": the run would train on the
            processor, for hours and unasked.
    """
    kind = _device_type(device)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in names if name not in environ]
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return World(device=torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
    if missing:
        # Guessing would make each process its own world, all writing to the same run.
        raise SettingError(f"{', '.join(missing)} not set, unlike others of {', '.join(names)}: use torchrun")
    try:
        rank, world_size, local_rank = (int(environ[name]) for name in names)
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise SettingError(f"one of {', '.join(names)}, LOCAL_WORLD_SIZE is not a number: {error}") from error
    if kind == "cpu":
        return World(rank, local_rank, world_size, local_world_size)
    if local_rank >= torch.cuda.device_count():
        raise SettingError(
            f"LOCAL_RANK = {local_rank}: this node has {torch.cuda.device_count()} GPUs; a rank needs one"
        )
    return World(rank, local_rank, world_size, local_world_size, torch.device("cuda", local_rank))


def _device_type(device: str) -> str:
    if device not in DEVICES:
        raise SettingError(f"--device {device}: allowed: {', '.join(DEVICES)}")
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
    """Divide the node's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    chosen = environ.get("OMP_NUM_THREADS")
    # With several ranks, torchrun itself sets 1 where nothing was chosen: too few on most nodes.
    if chosen and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environ and world.local_world_size > 1):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world.local_world_size))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the process at once: Python's handlers run only when torch no longer waits."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def connected(world: World) -> Iterator[None]:
    """Connect the ranks for as long as the block runs. Alone, there is nothing to do.

    When the block fails, the ranks stay connected: under NCCL, closing the connections waits for the other ranks, which
    wait in a collective for this one. The command says what went wrong and then calls `leave`.

    A model that `wrap` wrapped keeps the connections' threads; nothing outside the block may refer to it.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    # gloo for numbers on the CPU, so that agreeing on something never waits for the GPU.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    logger.info("waiting for %d ranks, where MASTER_ADDR and MASTER_PORT say", world.world_size)
    try:
        with _ended_by_signals():
            dist.init_process_group(backend, timeout=TIMEOUT, rank=world.rank, world_size=world.world_size)
    except (dist.DistError, ValueError) as error:
        raise TrainingError(f"rank {world.rank} could not reach the other ranks: {error}") from error
    try:
        yield
    except RuntimeError as error:
        # A rank that ends closes its connections; its own message says why it ended.
        if any(words in str(error).lower() for words in ("connection", "gloo", "nccl")):
            message = "lost contact with another rank; its message, further up or in its log, says why"
            raise TrainingError(message) from error
        raise
    gc.collect()  # cycles that refer to DDP
    dist.destroy_process_group()


def leave(code: int, error: BaseException | None = None) -> None:
    """End this process at once if its ranks are still connected, as they are after a failure; else do nothing.

    Skips destructors and does not wait for other threads: those of the connections would wait for ranks that wait for
    this one.

    Args:
        code: Exit code of the process.
        error: An error whose message has not been written yet; it is written as Python would.
    """
    if not dist.is_initialized():
        return
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has ended
            stream.flush()
    os._exit(code)


def wrap(model: nn.Module, world: World) -> nn.Module:
    """Return a model whose backward pass averages gradients over the ranks; on one rank, the model itself."""
    if world.world_size == 1:
        return model
    devices = [world.local_rank] if world.device.type == "cuda" else None
    # Running statistics are averaged where they matter (average_buffers), not sent before every step.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 renamed the option
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {option: False}
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **options)


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Return the element-wise sums over all ranks, in float64; every rank must give equally many `values`."""
    if world.world_size == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(world: World, value: int) -> int:
    """Return the largest of all ranks' values."""
    if world.world_size == 1:
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def broadcast(world: World, value: T) -> T:
    """Return the first rank's `value` on all ranks."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather(world: World, value: T) -> list[T] | None:
    """Return each rank's value on the first rank, None on the others."""
    if world.world_size == 1:
        return [value]
    values: list | None = [None] * world.world_size if world.is_main else None
    dist.gather_object(value, values)
    return values


@torch.no_grad()
def average_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks the mean of their BN running statistics, so that all evaluate and save one network."""
    if world.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world.world_size


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
        verdicts: list[tuple[bool, str] | None] = [None] * world.world_size
        dist.all_gather_object(verdicts, own)
        if failure is None:
            for rank, verdict in enumerate(verdicts):
                if verdict is not None:
                    kind = SettingError if verdict[0] else TrainingError
                    raise kind(f"rank {rank}: {verdict[1]}")
    if failure is not None:
        raise failure
