"""`trainer train`: open or resume a run, train, report the result."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from datapipe.cluster import rank_placement
from datapipe.console import NO_ROOM
from datapipe.errors import SettingError

from ..checkpoints.file import CHECKPOINT, set_aside
from ..checkpoints.local import local_folder, open_local
from ..config.recipe import Recipe
from ..errors import DivergedError, TrainingError
from ..optim.schedules import OneCycleSchedule
from ..ranks.connection import ended_by_signals
from ..ranks.heartbeat import RANK_TIMEOUT_S
from ..ranks.limits import warn_if_short
from ..ranks.stop import SIGNALS, StopSignal, signal_of
from ..ranks.world import World, broadcast, together
from ..reporting.loggers import LoggerFactory, find_loggers
from ..reporting.mlperf import read_labels
from ..reporting.runlog import NAME as METRICS
from ..reporting.runlog import read_lines
from ..reporting.summary import summary
from ..reporting.timing import Clock
from .job import Job, make_run_folder, open_job, open_world
from .loop import train
from .owner import own
from .record import describe_ranks, print_result, report_run, write_end, write_start
from .rehearsal import rehearse
from .resume import read_checkpoint, restore
from .saving import finish_failed
from .state import Losses, State

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """How a run is done, which does not change what is trained. Raises SettingError for a setting out of its range.

    Attributes:
        resume: Whether to continue the run that is there, from its checkpoint.
        device: Device to train on: auto, cpu or cuda.
        local: Folder on each node's own disk, to which the data set is staged first; None: it is not staged.
        rank_timeout_s: Longest time that a rank may do nothing before the run ends, in seconds, above 0.
        stop_signals: Names of the signals after which a checkpoint is saved and the run stops.
        ends_at: Time at which the process is to have ended, after a checkpoint, in seconds since 1970; None: when it is
            done.
        local_checkpoints: Folder on the first rank's own disk, to which checkpoints are written before they are copied
            to the run's in the background; None: they are written to that.
        log: Names of loggers that are told the run's metrics, too; see `find_loggers`.
    """

    resume: bool = False
    device: str = "auto"
    local: Path | None = None
    rank_timeout_s: float = RANK_TIMEOUT_S
    stop_signals: Sequence[str] = SIGNALS
    ends_at: float | None = None
    local_checkpoints: Path | None = None
    log: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.rank_timeout_s > 0:
            raise SettingError(f"--rank-timeout {self.rank_timeout_s:g}: must be more than 0 s")
        for name in self.stop_signals:
            signal_of(name)


def run(recipe: Recipe, data: Path, out: Path, options: RunOptions = RunOptions()) -> int:
    """Train a recipe on a data set.

    Args:
        recipe: Recipe to train.
        data: Packed data set: the folder that holds train/ and val/.
        out: Folder of the run.
        options: Options of the run, such as the device.

    Returns:
        The exit code. 0: target reached, or none set; 1: target missed (on the first rank only: a launcher would end
        it while it writes the report, if another rank failed before); 75: stopped before the time was over, 128 +
        number: by that signal; both after a checkpoint.

    Raises:
        SettingError: A setting is wrong; with several ranks, on all of them.
        DatapipeError: Training failed; with several ranks, on all of them.
    """
    clock = Clock()
    loggers = find_loggers(options.log)
    read_labels(os.environ, recipe.model_dump(mode="json"))
    opened = open_world(recipe, data, out, clock, options.device, options.local, options.rank_timeout_s)
    with opened as world, _advising(out, options.resume):
        world.watch.run = out
        stop = StopSignal(world, options.stop_signals, options.ends_at)
        if world.is_main:
            warn_if_short(options.ends_at, time.time())
        end = _run(recipe, options.local or data, out, options, world, clock, stop, loggers)
    if world.is_main:
        report = None if end["status"] == "interrupted" else report_run(out)
        print(summary(end, recipe.train.target_accuracy, report, out, recipe.published), flush=True)
    if stop.number and end["status"] == "interrupted":
        return stop.exit_code
    return int(end["status"] == "target_missed" and world.is_main)


@contextmanager
def _advising(out: Path, is_resumed: bool) -> Iterator[None]:
    """Have an OSError say how the run is continued, which is refused without --resume once it has begun."""
    try:
        yield
    except OSError as error:
        if not is_resumed and _is_begun(out):
            when = " when there is room" if error.errno in NO_ROOM else ""
            error.add_note(f"run the same command again with --resume{when}")
        raise


def _is_begun(out: Path) -> bool:
    return any((out / name).exists() for name in (CHECKPOINT, METRICS))


def _run(
    recipe: Recipe,
    data: Path,
    out: Path,
    options: RunOptions,
    world: World,
    clock: Clock,
    stop: StopSignal,
    loggers: Mapping[str, LoggerFactory],
) -> dict[str, Any]:
    """Train; return the "end" line. The job is closed here, while the ranks are still connected."""
    with ExitStack() as stack:
        with ended_by_signals(world.world_size):
            checkpoint = _open_run(recipe, out, options, world, stack)
            job = open_job(recipe, data, out, world, clock, stack)
            rehearse(job)
            clock.end_start()
            world.watch.doing("beginning, or continuing, the run", is_long=True)
            state, metrics_bytes = State(Losses(recipe.train.spike_factor)), 0
            with together(world):
                if checkpoint is not None:
                    metrics_bytes = restore(job, state, checkpoint)
            ended = state.status(recipe.train.target_accuracy, recipe.train.epochs)
            end = None
            with together(world), world.watch.at(out / METRICS) if world.is_main else nullcontext():
                if ended and world.is_main and (end := _read_end(out, ended, recipe)):
                    logger.info("the run in %s is complete", out)
                    if options.local_checkpoints is not None:  # some may not have been copied
                        _finish_local(options.local_checkpoints, out, recipe, checkpoint)
            if (end := broadcast(world, end)) is not None:
                return end
            with together(world):  # only once all ranks agree: a run that is refused stays as it is
                job.metrics.open(metrics_bytes)
                job.metrics.log_to(loggers)
                if checkpoint is not None and world.is_main:
                    with world.watch.at(out):
                        set_aside(out, checkpoint["damaged"])
            write_start(job, state, resumed=checkpoint is not None)
            with together(world):
                if options.local_checkpoints is not None and world.is_main:
                    opened = open_local(options.local_checkpoints, out, recipe.train.keep_checkpoints, checkpoint)
                    job = replace(job, local=stack.enter_context(opened))
                    stack.callback(world.watch.stop)  # other ranks, which fail as well, need not wait for copies
        local = job.local  # and not the job, whose connections would outlive it
        stop.save_s = lambda: state.longest_save_s + (local.longest_copy_s if local else 0)
        with stop:
            return _train_and_record(job, state, stop)


def _finish_local(local_checkpoints: Path, out: Path, recipe: Recipe, checkpoint: dict[str, Any] | None) -> None:
    """Copy what is left of a complete run's checkpoints on this node's own disk."""
    with open_local(local_checkpoints, out, recipe.train.keep_checkpoints, checkpoint) as local:
        local.finish()
        local.discard()


def _read_end(out: Path, status: str, recipe: Recipe) -> dict[str, Any] | None:
    """Return the "end" line of a run that has ended with this status, and for the same target."""
    path = out / METRICS
    lines = read_lines(path) if path.is_file() else []
    expected = {"event": "end", "status": status, "target_accuracy": recipe.train.target_accuracy}
    return lines[-1] if lines and expected.items() <= lines[-1].items() else None


def _open_run(recipe: Recipe, out: Path, options: RunOptions, world: World, stack: ExitStack) -> dict[str, Any] | None:
    """Return the checkpoint to continue from, None to begin. Only the first rank reads it: folders may lag on others.

    Owns `out` until `stack` closes, and before the checkpoint is read: it might be outdated by the time the data set
    is open.
    """
    checkpoint = None
    with together(world), world.watch.at(out) if world.is_main else nullcontext():
        if world.is_main:
            make_run_folder(out, stack)
            stack.enter_context(own(out, rank_placement(os.environ).job, world.watch.end))
            if _is_begun(out) and not options.resume:
                raise SettingError(f"--out {out}: holds a run; use --resume to continue it, or another folder")
            local = options.local_checkpoints and local_folder(options.local_checkpoints, out)
            checkpoint = read_checkpoint(out, recipe, local) if options.resume else None
            if options.resume and checkpoint is None:
                logger.info("nothing to resume in %s: it has no checkpoint; starting from the beginning", out)
    return broadcast(world, checkpoint)


def _train_and_record(job: Job, state: State, stop: StopSignal) -> dict[str, Any]:
    """Train; write and return the "end" line, which is also written when training fails."""
    try:
        status = train(job, state, stop)
        if job.local is not None:
            with job.world.watch.at(job.run):
                job.local.finish()
            job.local.discard()  # the run's folder has it all
    except torch.OutOfMemoryError as error:
        finish_failed(job)
        write_end(job, state, "failed")
        message = f"out of memory with train.batch_size = {job.recipe.train.batch_size}: {error}"
        raise TrainingError(message) from error
    except DivergedError as error:
        write_end(job, state, "failed")
        raise DivergedError(f"{error}. {_way_back(job, state)}") from error
    except BaseException:
        finish_failed(job)
        print_result(job, state, write_end(job, state, "failed"))
        raise
    stop.settle()
    job.world.watch.doing("finishing", is_long=True)
    ranks = describe_ranks(job)
    end = write_end(job, state, status, stop.reason if status == "interrupted" else None, ranks)
    try:
        with together(job.world):
            job.metrics.sync()
    except (OSError, TrainingError):
        print_result(job, state, end)
        raise
    return end


def _way_back(job: Job, state: State) -> str:
    """Return advice about a run that diverged."""
    path = (job.local.folder if job.local else job.run) / CHECKPOINT
    kept = f"There is no checkpoint yet ({path})"
    if state.saved is not None:
        kept = "{} is still that of epoch {}, step {}".format(path, *state.saved)
        kept += ": --resume continues from it" if state.saved[1] else ", where the run began"
    recipe = job.recipe
    rise = "peak_at" if isinstance(recipe.schedule, OneCycleSchedule) else "warmup_epochs"
    ways = [f"a lower optimizer.lr (now {recipe.optimizer.lr:g})"]
    ways.append(f"a longer rise of it (schedule.{rise}, now {getattr(recipe.schedule, rise):g})")
    if job.preconditioner is not None:
        ways.append(f"a higher kfac.damping (now {job.preconditioner.damping:g})")
        clip = job.preconditioner.kl_clip
        ways.append("a kfac.kl_clip" if clip is None else f"a lower kfac.kl_clip (now {clip})")
    return f"{kept}. In a new run, try {', '.join(ways)}; or the data is odd"
