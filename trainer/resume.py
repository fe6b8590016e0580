"""What a run saves in its checkpoint, and how it continues from there."""

from __future__ import annotations

import filecmp
import logging
import time
from pathlib import Path
from typing import Any

import torch

from datapipe.errors import SettingError

from .checkpoint import BEST, keep_as, list_checkpoints, load_checkpoint, restore_random, save_checkpoint
from .checkpoint import NAME as CHECKPOINT
from .config.recipe import Recipe, check_resumable, parse
from .distributed import averaged_buffers, gather, set_buffers, together
from .errors import CheckpointError, TrainingError
from .job import Job, check_finite, is_finite, read_loss
from .state import State

logger = logging.getLogger(__name__)

# Errors that loading a state raises where something is missing, or has another shape.
UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def save(job: Job, state: State, may_fail: bool = False) -> None:
    """Write a checkpoint; all ranks must call this. If it fails, the previous checkpoint stays as it is.

    Args:
        job: The run.
        state: Its progress.
        may_fail: Whether training continues where it cannot be written, as often as the recipe allows.

    Raises:
        DivergedError: The loss or the network is not finite; all ranks raise this.
        OSError: The first rank could not write; the others raise TrainingError.
    """
    job.world.watch.doing(f"writing the checkpoint of step {state.step}", is_long=True)
    read_loss(job, state)
    job.clock.drain()
    with job.clock.section("checkpoint"), averaged_buffers(job.module, job.world) as own_buffers:
        check_finite(job, state)  # the loss that was read is that of the parameters before their last update
        own_layers = job.preconditioner and job.preconditioner.state_dict()
        states, buffers = gather(job.world, _on_cpu(own_layers)), gather(job.world, _on_cpu(own_buffers))
        try:
            with together(job.world):
                if job.world.is_main:
                    content = _content(job, state) | {"preconditioner": states, "buffers": buffers}
                    save_checkpoint(job.run / CHECKPOINT, content, job.recipe.train.keep_checkpoints)
        except (OSError, TrainingError) as error:
            state.saved_at, state.failed_saves = time.monotonic(), state.failed_saves + 1
            if not may_fail or state.failed_saves > job.recipe.train.failed_checkpoints:
                raise
            if job.world.is_main:
                logger.error("no checkpoint of step %d: %s. %s", state.step, error, _what_stays(job, state))
            return
    state.saved, state.saved_at, state.failed_saves = (state.epoch, state.step), time.monotonic(), 0


def keep_best(job: Job, state: State) -> None:
    """Keep the run's checkpoint, which is that of the end of an evaluated epoch, as the best if none was better."""
    if state.accuracy == state.best_accuracy:
        try:
            if not _is_kept(job.run):
                keep_as(job.run / CHECKPOINT, job.run / BEST)
        except OSError as error:
            logger.error("%s", error)


def _is_kept(run: Path) -> bool:
    """Return whether the best checkpoint is the last one: a full disk may have no room for a new name."""
    last, best = run / CHECKPOINT, run / BEST
    return best.exists() and (last.samefile(best) or filecmp.cmp(last, best, shallow=False))


def _what_stays(job: Job, state: State) -> str:
    kept = "there is none yet" if state.saved is None else f"that of step {state.saved[1]} stays"
    allowed = job.recipe.train.failed_checkpoints
    return f"{kept}; training continues ({state.failed_saves} of {allowed} failures in a row that are allowed)"


def _on_cpu(value: object) -> object:
    """Return `value` with its tensors on the CPU: another rank's would arrive on that rank's GPU."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _content(job: Job, state: State) -> dict[str, Any]:
    return {
        "recipe": job.recipe.model_dump(mode="json"),
        "global_batch_size": job.recipe.train.batch_size,
        "data_sets": _data_sets(job),
        "state": state.state_dict(),
        "clock": job.clock.state_dict(),
        "loader": job.train_loader.state_dict(),
        "model": job.module.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "adaptive_damping": job.adaptive_damping and job.adaptive_damping.state_dict(),
        "scaler": job.scaler.state_dict(),
        "metrics_bytes": job.metrics.sync(),
    }


def _data_sets(job: Job) -> list[str]:
    return [str(loader.identity()["data_set"]) for loader in (job.train_loader, job.val_loader)]


def read_checkpoint(run: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the checkpoint of `run`, if there is one.

    Raises:
        CheckpointError: It cannot be read.
        SettingError: Its recipe learns something else than `recipe`.
    """
    paths = list_checkpoints(run)
    if not paths:
        return None
    path, content = _load_newest(paths)
    try:
        old = parse(content["recipe"])
    except (SettingError, KeyError) as error:
        raise CheckpointError(f"holds no recipe that this version knows: {error}", path=path) from error
    check_resumable(old, recipe)
    return content | {"file": path.name}


def _load_newest(paths: list[Path]) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint that can be read. Raises CheckpointError where none can."""
    first: CheckpointError | None = None
    for path in paths:
        try:
            content = load_checkpoint(path)
        except CheckpointError as error:
            first = first or error
        else:
            if first is not None:
                logger.warning("%s; continuing from the one before it, %s", first, path.name)
            return path, content
    assert first is not None
    raise first


def restore(job: Job, state: State, content: dict[str, Any]) -> int:
    """Set everything to where it was when a checkpoint was saved.

    Args:
        job: The run, whose objects are changed.
        state: Its progress, which is changed.
        content: Content of the checkpoint.

    Returns:
        The length of the metrics when the checkpoint was written, in bytes.

    Raises:
        CheckpointError: The data set is another one, something is missing or has another shape, or the network is
            not finite, as earlier versions saved it.
    """
    try:
        _put_back(job, state, content)
        metrics_bytes = content["metrics_bytes"]
    except SettingError:
        raise
    except UNFIT as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"cannot be continued from: {reason}", path=job.run / CHECKPOINT) from error
    if not is_finite(job.module):
        reason = "holds a network that is not finite, so no training can continue from it; start a new run"
        raise CheckpointError(reason, path=job.run / CHECKPOINT)
    if job.world.is_main and content.get("file") == CHECKPOINT and _is_after_evaluation(job, state):
        keep_best(job, state)  # in case that the run was killed before it could
    return metrics_bytes


def _is_after_evaluation(job: Job, state: State) -> bool:
    is_evaluated = bool(state.evaluations) and state.evaluations[-1]["epoch"] == state.epoch
    return is_evaluated and state.step == state.epoch * job.steps_per_epoch


def _put_back(job: Job, state: State, content: dict[str, Any]) -> None:
    if content["data_sets"] != _data_sets(job):
        raise CheckpointError("was trained on another data set than --data has now", path=job.run / CHECKPOINT)
    job.module.load_state_dict(content["model"])
    buffers = content.get("buffers", [])  # not in a checkpoint of an earlier version
    if len(buffers) == job.world.world_size:  # others begin with the mean, which "model" has
        set_buffers(job.module, buffers[job.world.rank])
    job.optimizer.load_state_dict(content["optimizer"])
    if job.preconditioner is not None:
        job.preconditioner.load_state_dict(*content["preconditioner"])
    if job.adaptive_damping is not None:
        job.adaptive_damping.load_state_dict(content["adaptive_damping"])
    job.scaler.load_state_dict(content["scaler"])
    job.train_loader.load_state_dict(content["loader"])
    state.load_state_dict(content["state"])
    state.saved = state.epoch, state.step
    job.clock.load_state_dict(content["clock"])
    restore_random(content)
