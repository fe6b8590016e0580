"""A pass before the first step that changes nothing, for what would otherwise happen in that step.

B batch, C channels, H height, W width
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from datapipe.loaders import Batch

from ..ranks.world import gather_everywhere
from .job import Job
from .objective import batch_loss

logger = logging.getLogger(__name__)

# Steps. An estimate: to compile takes 1 to 2 minutes, and fused kernels save about 10 ms in a step of ResNet-50.
_COMPILED_FROM = 10_000


def rehearse(job: Job) -> None:
    """Do a forward and a backward pass with black images, if it is needed; all ranks must call this.

    With several ranks, DDP arranges its buckets of gradients for good. Otherwise it would do so after the first step,
    also of a run that is resumed. Where a gradient lies decides in which order ranks add it up, and how a sum over it
    is rounded: the run would not end with the same bits.

    A network that is to be compiled is compiled, for training and for evaluation, so that no step is slower than the
    others; the time that it takes is counted apart. It is compiled for all sizes that the run will have, in their
    order, so that a resumed run computes with the same kernels. If a rank cannot compile it, no rank does.
    """
    if job.world.world_size > 1:  # first: with a static graph, DDP must not have seen a pass that sends nothing
        _pass(job, _black(job, 2, job.train_loader.size))  # BN needs 2
    if reason := why_not_compiled(job):
        if job.recipe.train.compile == "auto" and job.world.device.type == "cuda" and job.world.is_main:
            logger.info("not compiled: %s; train.compile = true compiles it", reason)
    else:
        job.module.compile(mode=job.recipe.train.compile_mode)  # in place, so that parameters keep their names
        with job.clock.section("compile"):
            _compile(job)


def why_not_compiled(job: Job) -> str:
    """Say why a network is not to be compiled; "" if it is."""
    train = job.recipe.train
    if train.compile != "auto":
        return "" if train.compile else "train.compile = false"
    if job.world.device.type != "cuda":
        return "it trains on a processor"
    if job.preconditioner is not None:
        return "the hooks of K-FAC would cut it at every layer"
    if (steps := train.epochs * job.steps_per_epoch) < _COMPILED_FROM:
        return f"in a run of {steps:,} steps, compiling would take longer than it saves"
    return ""


def _compile(job: Job) -> None:
    """Compile all passes, or none on any rank. No gradient is sent, as a rank that fails would leave others alone.

    DDP is there nonetheless, so that the compiler knows where to cut the graph to send gradients early.
    """
    for what in _passes(job):
        failure = None
        job.world.watch.doing("compiling the network, which may take minutes", is_long=True)
        try:
            with job.model.no_sync() if isinstance(job.model, DistributedDataParallel) else nullcontext():
                what()
            if job.world.device.type == "cuda":
                torch.cuda.synchronize(job.world.device)
        except torch.OutOfMemoryError:
            raise  # without compilation there would be even less
        except (RuntimeError, OSError, ImportError) as error:
            said = str(error).strip().partition("\n")[0]
            failure = f"rank {job.world.rank}: {type(error).__name__}: {said}"
        # After each pass: K-FAC's statistics are sent in it, also by a rank that fails, but not in the next.
        failures = [text for text in gather_everywhere(job.world, failure) if text is not None]
        if failures:
            job.module._compiled_call_impl = None  # as `compile` has set it; torch has no other way back
            if job.world.is_main:
                logger.warning("train.compile: not compiled, which is slower, as it failed. %s", failures[0])
            return


def _passes(job: Job) -> Iterator[Callable[[], None]]:
    """Yield a pass of each kind that the run will do: in training for all sizes in their order, and in evaluation."""
    data, epochs = job.recipe.data, job.recipe.train.epochs
    num_images = job.train_loader.options.batch_size // job.recipe.train.accumulation_steps
    for size in sorted({data.size_at(epoch, epochs) for epoch in range(epochs)}):
        batch = _black(job, num_images, size)
        yield partial(_pass, job, batch)
        if job.adaptive_damping is not None:  # it looks at the loss again
            yield partial(_pass, job, batch, with_gradients=False)
    yield partial(_evaluate, job, _black(job, job.val_loader.options.batch_size, job.val_loader.size))


def _pass(job: Job, batch: Batch, with_gradients: bool = True) -> None:
    buffers = [(buffer, buffer.clone()) for buffer in job.model.buffers()]
    device = job.world.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with torch.set_grad_enabled(with_gradients):
                loss = batch_loss(job, batch, 0)
            if with_gradients:
                loss.backward()
    finally:
        job.model.zero_grad(set_to_none=True)
        for buffer, value in buffers:
            buffer.copy_(value)
        if job.preconditioner is not None:
            job.preconditioner.discard()


@torch.no_grad()
def _evaluate(job: Job, batch: Batch) -> None:
    job.module.eval()
    try:
        with job.precision.autocast():
            job.module(batch.images)
    finally:
        job.module.train()


def _black(job: Job, num_images: int, size: int) -> Batch:
    """Return a batch of black images, with the strides that a loader's have."""
    device, shape = job.world.device, (num_images, size, size, job.train_loader.channels)
    images_BHWC = torch.zeros(shape, dtype=torch.uint8, device=device)
    zeros_B = torch.zeros(num_images, dtype=torch.int64, device=device)
    return Batch(images_BHWC.permute(0, 3, 1, 2), zeros_B, zeros_B, zeros_B == 0)
