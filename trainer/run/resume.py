"""How a run continues from its checkpoint, which `saving` has written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from datapipe.errors import SettingError

from ..checkpoints.file import CHECKPOINT, list_checkpoints, load_checkpoint, restore_random
from ..config.recipe import Recipe, check_resumable, parse
from ..errors import CheckpointError
from ..ranks.world import set_buffers
from ..reporting.metrics import digest_before
from ..reporting.runlog import NAME as METRICS
from .job import Job, is_finite
from .saving import keep_best
from .state import State

logger = logging.getLogger(__name__)

# Errors that loading a state raises where something is missing, or has another shape.
_UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def read_checkpoint(run: Path, recipe: Recipe, local: Path | None = None) -> dict[str, Any] | None:
    """Return the newest checkpoint of a run, if there is one.

    Args:
        run: Folder of the run.
        recipe: Recipe that is to be learnt.
        local: Folder of this run's checkpoints on the node's own disk, if there may be one.

    Returns:
        Its content, its "path", and the paths of newer ones in `run` that are "damaged".

    Raises:
        CheckpointError: There are some, and none can be read.
        PermissionError: One may not be read.
        SettingError: Its recipe learns something else than `recipe`.
    """
    errors: list[CheckpointError] = []  # of those that cannot be read
    ours = _load_newest([path for path in [local / CHECKPOINT] if path.exists()], errors) if local else None
    if ours is not None and not _fits_metrics(ours[1], run):
        logger.warning("%s: the run was continued elsewhere meanwhile; it is not used", ours[0])
        ours = None
    contents = [each for each in (_load_newest(list_checkpoints(run), errors), ours) if each is not None]
    if not contents:
        if errors:
            raise CheckpointError(f"{errors[0].message}; start a new run", path=errors[0].path)
        return None
    path, content = max(contents, key=lambda each: _progress(each[1]))
    if errors:
        logger.warning("%s; continuing from %s", "; ".join(map(str, errors)), path)
    try:
        old = parse(content["recipe"])
    except (SettingError, KeyError) as error:
        raise CheckpointError(f"holds no recipe that this version knows: {error}", path=path) from error
    check_resumable(old, recipe)
    damaged = [str(error.path) for error in errors if Path(str(error.path)).parent == run]
    return content | {"path": str(path), "damaged": damaged}


def _fits_metrics(content: dict[str, Any], run: Path) -> bool:
    """Return whether a run's metrics still begin with those of a checkpoint."""
    return content.get("metrics_digest") == digest_before(run / METRICS, content.get("metrics_bytes", 0))


def _progress(content: dict[str, Any]) -> tuple[int, int, int]:
    """Return what rises from one checkpoint of a run to the next: a roll-back takes the step back, and is counted."""
    state = content.get("state") or {}
    return state.get("recoveries", 0), state.get("epoch", 0), state.get("step", 0)


def _load_newest(paths: list[Path], errors: list[CheckpointError]) -> tuple[Path, dict[str, Any]] | None:
    """Return the first checkpoint that can be read, if there is one, and add the errors of those before it."""
    for path in paths:
        try:
            return path, load_checkpoint(path)
        except CheckpointError as error:
            errors.append(error)
    return None


def restore(job: Job, state: State, content: dict[str, Any], is_resumed: bool = True) -> int:
    """Set everything to where it was when a checkpoint was saved.

    Args:
        job: The run, whose objects are changed.
        state: Its progress, which is changed.
        content: Content of the checkpoint.
        is_resumed: Whether the run was stopped; otherwise it is rolled back, and the time has passed all the same.

    Returns:
        The length of the metrics when the checkpoint was written, in bytes.

    Raises:
        CheckpointError: The data set is another one, something is missing or has another shape, or the network is
            not finite, as earlier versions saved it.
    """
    try:
        _put_back(job, state, content)
        if is_resumed:
            job.clock.load_state_dict(content["clock"])
        metrics_bytes = content["metrics_bytes"]
    except SettingError:
        raise
    except _UNFIT as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"cannot be continued from: {reason}", path=content["path"]) from error
    if not is_finite(job.module):
        reason = "holds a network that is not finite, so no training can continue from it; start a new run"
        raise CheckpointError(reason, path=content["path"])
    if is_resumed and job.world.is_main and state.accuracy == state.best_accuracy and _is_after_evaluation(job, state):
        keep_best(Path(content["path"]), job)  # in case that the run was killed before it could
    return metrics_bytes


def _is_after_evaluation(job: Job, state: State) -> bool:
    is_evaluated = bool(state.evaluations) and state.evaluations[-1]["epoch"] == state.epoch
    return is_evaluated and state.step == state.epoch * job.steps_per_epoch


def _put_back(job: Job, state: State, content: dict[str, Any]) -> None:
    if content["data_sets"] != job.data_sets:
        raise CheckpointError("was trained on another data set than --data has now", path=job.run / CHECKPOINT)
    job.module.load_state_dict(content["model"])
    buffers = content.get("buffers", [])  # not in a checkpoint of an earlier version
    if len(buffers) == job.world.world_size:  # others begin with the mean, which "model" has
        set_buffers(job.module, buffers[job.world.rank])
    job.average.load_state_dict(content.get("average"))
    buffers = content.get("average_buffers") or []
    if len(buffers) == job.world.world_size and job.average.is_on:
        with job.average.in_place():
            set_buffers(job.module, buffers[job.world.rank])
    job.optimizer.load_state_dict(content["optimizer"])
    if job.preconditioner is not None:
        job.preconditioner.load_state_dict(*content["preconditioner"])
    if job.adaptive_damping is not None:
        job.adaptive_damping.load_state_dict(content["adaptive_damping"])
    if content["scaler"]:  # it has none if it was of another precision, on another GPU
        job.scaler.load_state_dict(content["scaler"])
    state.load_state_dict(content["state"])
    job.train_loader.set_size(job.recipe.data.size_at(state.epoch, job.recipe.train.epochs))
    job.train_loader.load_state_dict(content["loader"])
    state.saved = state.epoch, state.step
    restore_random(content)
