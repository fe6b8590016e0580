"""What a training step minimises.

B batch, C channels, H height, W width, K classes
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from datapipe.loaders import Batch

from ..step.losses import per_sample_loss
from ..step.mixing import MixedBatch, mix
from .job import Job
from .state import State


def batch_loss(job: Job, batch: Batch, step: int, answers: list[Tensor] | None = None) -> Tensor:
    """Return a batch's mean loss on this rank, a scalar. A bad sample, whose image is black, has none.

    Args:
        job: The run.
        batch: This rank's slice of the step's global batch.
        step: Number of the step in the run, from 0, on which the mixing of images depends.
        answers: List to which `count_answers` of the batch is added, unless its images are mixed: these have no single
            label.
    """
    data, train = job.recipe.data, job.recipe.train
    mixed = MixedBatch(batch.images, batch.labels, batch.valid)
    mixed = mix(mixed, data.mixup, data.cutmix, (train.seed, step, job.world.rank))
    with job.precision.autocast():
        logits_BK = job.model(mixed.images)
    logits_BK = logits_BK.float()
    if answers is not None and mixed.others is None:
        answers.append(count_answers(logits_BK, mixed))
    loss_B = per_sample_loss(train.loss, logits_BK, mixed.labels, train.label_smoothing)
    if mixed.others is not None:  # a loss is linear in its target
        other_B = per_sample_loss(train.loss, logits_BK, mixed.others, train.label_smoothing)
        loss_B = mixed.weight * loss_B + (1.0 - mixed.weight) * other_B
    # Still a mean over all slots, so that valid samples weigh the same on each rank, and as much as K-FAC assumes.
    return loss_B.where(mixed.valid, 0).mean()


@torch.no_grad()
def count_answers(logits_BK: Tensor, batch: MixedBatch) -> Tensor:
    """Return int64[2], on the device: how many of a batch's valid images are classified correctly, and their number."""
    right_B = (logits_BK.argmax(dim=1) == batch.labels) & batch.valid
    return torch.stack([right_B.sum(), batch.valid.sum()])


def backward(job: Job, state: State, batch: Batch, is_long: bool = False) -> Tensor:
    """Add the gradients of a batch's mean loss to the parameters', in parts, if the recipe says so.

    Args:
        job: The run.
        state: Its progress, to whose losses this one is added.
        batch: This rank's slice of the step's global batch.
        is_long: Whether it may take longer than other steps.

    Returns:
        The loss, a scalar.
    """
    if job.recipe.train.compile_mode != "default":
        torch.compiler.cudagraph_mark_step_begin()  # CUDA graphs may reuse the memory of the last step's results
    watch, parts = job.world.watch, _divide(batch, job.recipe.train.accumulation_steps)
    losses: list[Tensor] = []
    answers: list[Tensor] = []
    for number, part in enumerate(parts, start=1):
        watch.doing(f"forward pass of step {state.step + 1}", is_long=is_long, section=1)
        is_last, model = number == len(parts), job.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
            loss = batch_loss(job, part, state.step, answers) / len(parts)
            watch.doing(f"backward pass of step {state.step + 1}", is_long=is_long)
            job.scaler.scale(loss).backward()
        losses.append(loss.detach())
    loss = sum(losses[1:], start=losses[0])
    state.losses.add(loss, batch.samples, answers)
    return loss


def whole_loss(job: Job, batch: Batch, step: int) -> Tensor:
    """Return a batch's mean loss on this rank, a scalar, in the parts that `backward` takes.

    Args:
        job: The run.
        batch: This rank's slice of the step's global batch.
        step: Number of the step in the run, from 0.
    """
    parts = _divide(batch, job.recipe.train.accumulation_steps)
    return torch.stack([batch_loss(job, part, step) for part in parts]).mean()


def _divide(batch: Batch, count: int) -> list[Batch]:
    if count == 1:
        return [batch]
    chunks = (getattr(batch, field.name).chunk(count) for field in fields(batch))
    return [Batch(*part) for part in zip(*chunks, strict=True)]
