"""Saving a run's checkpoint, while training continues.

All ranks copy what they have into the host's memory; a thread of each sends it to the first rank's, which writes the
file. What came of that is known to all ranks when the next checkpoint is due, or when a checkpoint must be there.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoints.file import BEST, CHECKPOINT, keep_as, random_state, save_checkpoint
from ..config.recipe import Recipe
from ..errors import TrainingError
from ..ranks.world import averaged_buffers, gather, together
from ..reporting.metrics import digest_before
from ..reporting.runlog import NAME as METRICS
from .job import Job, check_finite
from .state import State

logger = logging.getLogger(__name__)

_GRACE_S = 60.0  # for what is being written when a run fails: other ranks may be gone, for whose part it waits


def save(job: Job, state: State, may_fail: bool = False, is_best: bool = False) -> None:
    """Begin to write a checkpoint; all ranks must call this. If it fails, the previous one stays as it is.

    Args:
        job: The run.
        state: Its progress.
        may_fail: Whether training continues meanwhile, and where it cannot be written, as often as the recipe allows;
            and while it is copied from this node's disk to the run's folder.
        is_best: Whether it is that of the best epoch.

    Raises:
        DivergedError: The loss or the network is not finite; all ranks raise this.
        OSError: The first rank could not write this one, or the one before; the others raise TrainingError.
    """
    settle(job, state)
    job.world.watch.doing(f"copying the checkpoint of step {state.step}", is_long=True)
    state.losses.read(job.world, state.step)
    job.clock.drain()
    with job.clock.section("checkpoint"):
        own, write = _copy(job, state, is_best, must_arrive=not may_fail)
        job.saver.begin(partial(_write, job, own, write), (state.epoch, state.step), may_fail)
    state.saved_at = time.monotonic()
    if not may_fail:
        settle(job, state)


def settle(job: Job, state: State) -> None:
    """Wait for the checkpoint that is being written, if there is one; all ranks must call this.

    Raises:
        OSError: The first rank could not write it, and it had to, or none of the last few could be; the others raise
            TrainingError.
    """
    pending = job.saver.take()
    if pending is None:
        return
    step = pending.place[1]
    job.world.watch.doing(f"writing the checkpoint of step {step}", is_long=True)
    with job.clock.section("checkpoint"):
        try:
            with together(job.world), job.world.watch.at(_folder(job)) if job.world.is_main else nullcontext():
                pending.thread.join()
                state.longest_save_s = job.saver.longest_s
                for error in pending.errors:
                    raise error
        except (OSError, TrainingError) as error:
            state.failed_saves += 1
            ends = not pending.may_fail or state.failed_saves > job.recipe.train.failed_checkpoints
            if job.world.is_main:
                logger.error("%s", _describe_failure(job, state, step, error, ends))
            if ends:
                raise
        else:
            state.saved, state.failed_saves = pending.place, 0


def finish_failed(job: Job) -> None:
    """Wait a while for the checkpoint that is being written, where a run has failed, perhaps on this rank alone."""
    job.saver.close(None if job.world.world_size == 1 else _GRACE_S)


def _folder(job: Job) -> Path:
    return (job.run if job.local is None else job.local.folder) / CHECKPOINT


class _Content(NamedTuple):
    """What the first rank writes, beside what it is sent. `error`: why it could not be had."""

    content: dict[str, Any]
    is_best: bool
    must_arrive: bool
    error: OSError | None


def _copy(job: Job, state: State, is_best: bool, must_arrive: bool) -> tuple[dict[str, Any], _Content | None]:
    """Return copies of what this rank alone has, and on the first rank of what all have."""
    take, content, error = job.saver.snapshot.take, {}, None
    with averaged_buffers(job.module, job.world) as own_buffers:
        check_finite(job, state)  # the loss that was read is that of the parameters before their last update
        # What may wait for the device comes before the copies, for which it would wait as well.
        layers = job.preconditioner and job.preconditioner.state_dict(_repeats_bits(job.world.device, job.recipe))
        if job.world.is_main:
            try:
                content = take(_describe(job, state), "content")
            except OSError as failure:
                error = failure
        own = take({"preconditioner": layers, "buffers": own_buffers}, "own")
    average, own["average_buffers"] = _copy_average(job)
    if not job.world.is_main:
        return own, None
    return own, _Content(content | {"average": average}, is_best, must_arrive, error)


def _repeats_bits(device: torch.device, recipe: Recipe) -> bool:
    """Return whether a run that is resumed must end with the bits of one that never stopped.

    For that K-FAC's solutions, which are older than its factors, must be saved. Where nothing is promised, as on a GPU
    by default, the first step after resuming computes them from the factors.
    """
    return device.type == "cpu" or recipe.train.deterministic


def _copy_average(job: Job) -> tuple[dict[str, Any] | None, dict[str, Tensor] | None]:
    """Return copies of the averaged network's state, if there is one, and of this rank's own buffers of it."""
    if not job.average.is_on:
        return None, None
    take = job.saver.snapshot.take
    with job.average.in_place(), averaged_buffers(job.module, job.world) as own_buffers:
        average = take(job.module.state_dict(), "average") if job.world.is_main else None
        return average, take(own_buffers, "average_buffers")


def _write(job: Job, own: dict[str, Any], mine: _Content | None) -> None:
    """In a thread: send what this rank has to the first one, which writes all."""
    job.saver.snapshot.wait()
    parts = gather(job.world, own, job.saver.group)
    if parts is None or mine is None:
        return
    if mine.error is not None:
        raise mine.error
    content = mine.content | {name: [part[name] for part in parts] for name in own}
    content["average_buffers"] = content["average_buffers"] if content["average"] is not None else None
    job.metrics.fsync()
    content["metrics_digest"] = digest_before(job.run / METRICS, content["metrics_bytes"])
    if job.local is not None and job.local.save(content, mine.is_best):
        if mine.must_arrive:
            job.local.finish()
        job.local.check()  # the copy of an earlier one may have failed
        return
    save_checkpoint(job.run / CHECKPOINT, content, job.recipe.train.keep_checkpoints)
    if mine.is_best:
        keep_best(job.run / CHECKPOINT, job)


def keep_best(path: Path, job: Job) -> None:
    """Keep a checkpoint as that of the best epoch. A failure is only logged."""
    best = job.run / BEST
    try:
        if not (best.exists() and best.samefile(path)):
            keep_as(path, best)
    except OSError as error:
        logger.error("%s", error)


def _describe_failure(job: Job, state: State, step: int, error: Exception, ends: bool) -> str:
    """Return what it means for a run, which ends or not, that its checkpoint could not be written."""
    failures, allowed = state.failed_saves, job.recipe.train.failed_checkpoints
    kept = "there is none yet" if state.saved is None else f"that of step {state.saved[1]} stays"
    if not ends:
        continues = f"training continues ({failures} of {allowed} failures in a row that are allowed)"
        return f"no checkpoint of step {step}: {error}. {kept}; {continues}"
    why = "it is the last one, which must be written"
    if failures > allowed:
        why = f"failure {failures} in a row; given up after {allowed}, as train.failed_checkpoints says"
    return f"without the checkpoint of step {step} the run ends: {why}; {kept}"


def _describe(job: Job, state: State) -> dict[str, Any]:
    return {
        "recipe": job.recipe.model_dump(mode="json"),
        "global_batch_size": job.recipe.train.batch_size,
        "data_sets": job.data_sets,
        "state": state.state_dict(),
        "clock": job.clock.state_dict(),
        "loader": job.train_loader.state_dict(),
        "model": job.module.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "adaptive_damping": job.adaptive_damping and job.adaptive_damping.state_dict(),
        "scaler": job.scaler.state_dict(),
        "metrics_bytes": job.metrics.flush(),
        "random": random_state(),
    }
