"""A pass before the first step that changes nothing, for what would otherwise happen in that step.

B batch, C channels, H height, W width
"""

from __future__ import annotations

import torch

from .job import Job


def rehearse(job: Job) -> None:
    """Do a forward and a backward pass with black images, if it is needed; all ranks must call this.

    With several ranks, DDP arranges its buckets of gradients for good. Otherwise it would do so after the first step,
    also of a run that is resumed. Where a gradient lies decides in which order ranks add it up, and how a sum over it
    is rounded: the run would not end with the same bits.

    A network that is to be compiled is compiled, for training and for evaluation, so that no step is slower than the
    others; the time that it takes is counted apart. It is compiled for all sizes that the run will have, in their
    order, so that a resumed run computes with the same kernels.
    """
    data, epochs = job.recipe.data, job.recipe.train.epochs
    if job.recipe.train.compile:
        with job.clock.section("compile"):
            for size in sorted({data.size_at(epoch, epochs) for epoch in range(epochs)}):
                _pass(job, job.train_loader.options.batch_size // job.recipe.train.accumulation_steps, size)
            _evaluate(job, job.val_loader.options.batch_size, job.val_loader.size)
            if job.world.device.type == "cuda":
                torch.cuda.synchronize(job.world.device)
    elif job.world.world_size > 1:
        _pass(job, 2, job.train_loader.size)  # as few as batch normalisation takes


def _pass(job: Job, num_images: int, size: int) -> None:
    buffers = [(buffer, buffer.clone()) for buffer in job.model.buffers()]
    device = job.world.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with job.precision.autocast():
            logits_BK = job.model(_black(job, num_images, size))
        logits_BK.float().sum().backward()
    job.model.zero_grad(set_to_none=True)
    for buffer, value in buffers:
        buffer.copy_(value)
    if job.preconditioner is not None:
        job.preconditioner.discard()


@torch.no_grad()
def _evaluate(job: Job, num_images: int, size: int) -> None:
    job.module.eval()
    with job.precision.autocast():
        job.module(_black(job, num_images, size))
    job.module.train()


def _black(job: Job, num_images: int, size: int) -> torch.Tensor:
    """Return the network's input for black images, with the strides that a loader's have."""
    images_BHWC = torch.zeros(
        num_images, size, size, job.train_loader.channels, dtype=torch.uint8, device=job.world.device
    )
    return job.prepare(images_BHWC.permute(0, 3, 1, 2))
