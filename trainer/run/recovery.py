"""What a run does after a step whose loss is not finite, or a spike: skip it, roll back, or stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from datapipe.console import format_count, format_some
from datapipe.dataset.index import read_keys
from datapipe.errors import ManifestError
from datapipe.loaders import Batch

from ..checkpoints.file import CHECKPOINT, set_aside
from ..errors import BadStep, DivergedError
from ..ranks.world import broadcast, gather, together
from .job import Job
from .resume import read_checkpoint, restore
from .saving import save, settle
from .state import State

logger = logging.getLogger(__name__)

_SHOWN_KEYS = 8  # of a batch, in messages; metrics.jsonl has all


@contextmanager
def naming_samples(job: Job) -> Iterator[None]:
    """Log the samples of a step after which the block raises DivergedError, and write them to the metrics."""
    try:
        yield
    except DivergedError as error:
        if error.bad_step is not None:
            _tell(job, error.bad_step, str(error))
        raise


def _tell(job: Job, bad_step: BadStep, message: str) -> None:
    """Tell which samples a bad step had; all ranks must call this."""
    job.world.watch.doing(f"telling about step {bad_step.number}", is_long=True)
    steps = gather(job.world, (bad_step.loss, bad_step.samples))
    if steps is None:
        return
    worst = [rank for rank, (loss, _) in enumerate(steps) if not math.isfinite(loss)]
    worst = worst or [max(range(len(steps)), key=lambda rank: steps[rank][0])]
    keys_of = {rank: _keys(job, [sample for sample in steps[rank][1] if sample >= 0]) for rank in worst}
    for rank, keys in keys_of.items():
        loss, host = steps[rank][0], job.world.host_of[rank] if job.world.host_of else "this host"
        images = format_count(len(keys), "image")
        logger.error(
            "%s; on rank %d (%s) it was %.4g, for %s: %s",
            message,
            rank,
            host,
            loss,
            images,
            format_some(keys, _SHOWN_KEYS),
        )
        job.metrics.write("diverged", step=bad_step.number, rank=rank, host=host, loss=loss, keys=keys)


def _keys(job: Job, samples: list[int]) -> list[str]:
    """Return the keys of training samples; their numbers where the data set has none, or none that can be read."""
    try:
        with job.world.watch.at(job.data / "train"):
            keys = read_keys(job.data / "train")
        return [keys[sample] for sample in samples]
    except (ManifestError, OSError, IndexError):
        return [f"number {sample}" for sample in samples]


def _count(job: Job, state: State, error: DivergedError) -> None:
    """Count a recovery. Raises DivergedError where that is one too many."""
    allowed = job.recipe.train.max_recoveries
    if state.recoveries >= allowed:
        raise DivergedError(f"{error}, after {format_count(allowed, 'recovery', 'recoveries')}") from error
    state.recoveries += 1


class Skipper:
    """Updates the parameters after a step; if its loss diverges, undoes what the step did before.

    Args:
        job: The run.
        update: Function that updates the parameters.
    """

    def __init__(self, job: Job, update: Callable[[Job, State, Batch, Tensor, bool], None]) -> None:
        self._update = update
        self._keep_buffers(job)

    def _keep_buffers(self, job: Job) -> None:
        """Keep what the next forward pass changes: running statistics."""
        self._buffers = [buffer.clone() for buffer in job.module.buffers()]

    def __call__(self, job: Job, state: State, batch: Batch, loss: Tensor, is_long: bool) -> None:
        """Do `update`, or leave it out; all ranks do the same. Raises DivergedError if no more may be left out."""
        step = state.step + 1
        job.world.watch.doing(f"update of step {step}", is_long)
        try:
            with naming_samples(job):
                state.losses.read(job.world, step, _has_finite_gradients(job))
        except DivergedError as error:
            _count(job, state, error)
            with torch.no_grad():
                for buffer, kept in zip(job.module.buffers(), self._buffers, strict=True):
                    buffer.copy_(kept)
            if job.preconditioner is not None:
                job.preconditioner.discard()
            job.optimizer.zero_grad(set_to_none=True)
            if job.world.is_main:
                logger.warning("step %d is skipped: its parameters stay", step)
            job.metrics.write("skip", step=step)
        else:
            self._update(job, state, batch, loss, is_long)
            self._keep_buffers(job)


def _has_finite_gradients(job: Job) -> bool:
    """Return whether they are finite; with loss scaling, which looks at them itself, always True."""
    if job.scaler.is_enabled():
        return True
    gradients = [parameter.grad for parameter in job.module.parameters() if parameter.grad is not None]
    return bool(torch.nn.utils.get_total_norm(gradients, norm_type=math.inf).isfinite())


def roll_back(job: Job, state: State, error: DivergedError) -> None:
    """Continue from the run's last checkpoint with a lower learning rate; all ranks must call this.

    Args:
        job: The run.
        state: Its progress, which is changed.
        error: Why.

    Raises:
        DivergedError: There is no checkpoint, as none could be written, the run was rolled back as often as it may, or
            the recipe says to stop.
        CheckpointError: The checkpoint cannot be read.
    """
    settle(job, state)
    settings = job.recipe.train
    if settings.when_diverged != "roll_back" or state.saved is None:
        raise error
    _count(job, state, error)
    recoveries, lr_factor, from_step = state.recoveries, state.lr_factor * settings.roll_back_lr_factor, state.step
    job.world.watch.doing("rolling back", is_long=True)
    content = None
    with together(job.world):
        if job.world.is_main:
            with job.world.watch.at(job.run / CHECKPOINT):
                content = read_checkpoint(job.run, job.recipe, job.local.folder if job.local else None)
    content = broadcast(job.world, content)
    assert content is not None  # it has been saved
    with together(job.world):
        restore(job, state, content, is_resumed=False)
    with together(job.world):
        if job.world.is_main:
            with job.world.watch.at(job.run):
                set_aside(job.run, content["damaged"])
    job.optimizer.zero_grad(set_to_none=True)
    state.recoveries, state.lr_factor = recoveries, lr_factor
    if job.world.is_main:
        message = "rolled back from step %d to %d, in epoch %d; the learning rate is %.4g of the schedule's from now on"
        logger.warning(message, from_step, state.step, state.epoch + 1, lr_factor)
    job.metrics.write(
        "roll_back", step=state.step, epoch=state.epoch, from_step=from_step, lr_factor=lr_factor,
        elapsed_s=job.clock.elapsed_s,
    )  # fmt: skip
    save(job, state, may_fail=True)  # a run that is resumed must know of it
