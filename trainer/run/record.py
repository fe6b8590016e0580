"""What a run writes about itself: the lines at its start and its end, and its report."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from datapipe.console import format_count
from datapipe.dataset.manifest import MANIFEST, SPLITS, Manifest
from datapipe.errors import DatapipeError
from datapipe.loaders.native_pixels import choose_native

from ..optim.kfac import preconditioner_counts
from ..ranks.world import gather, sum_over_ranks
from ..reporting import metrics, mlperf
from ..reporting.changes import advise_kfac, describe_kfac
from ..reporting.runlog import FORMAT, wait_share
from ..reporting.summary import summary
from .job import Job
from .state import State

logger = logging.getLogger(__name__)


def write_start(job: Job, state: State, resumed: bool) -> None:
    """Write the line about the run, if it begins, or about its being resumed; only the first rank does.

    Args:
        job: The run.
        state: Its progress.
        resumed: Whether it continues from a checkpoint.
    """
    world = job.world
    if not world.is_main:
        return
    if resumed:
        logger.info("resuming at step %d, in epoch %d", state.step, state.epoch + 1)
    if job.metrics.is_empty:
        job.metrics.write("run", **_describe_run(job))
    if resumed:
        job.metrics.write(
            "resume",
            epoch=state.epoch,
            step=state.step,
            elapsed_s=job.clock.elapsed_s,
            world_size=world.world_size,
            waited_s=job.metrics.waited_s,
            repeated_steps=max(0, job.metrics.cut_step - state.step),
            target_accuracy=job.recipe.train.target_accuracy,
        )
    where = metrics.device_name(world.device), format_count(world.world_size, "rank")
    logger.info("%s on %s, %s, precision %s", job.recipe.name, *where, job.precision.name)


def _describe_run(job: Job) -> dict[str, Any]:
    """Return what the first line says of a run."""
    world, recipe = job.world, job.recipe.model_dump(mode="json")
    return {
        "format": FORMAT,
        "recipe": recipe,
        "recipe_name": job.recipe.name,
        "commit": metrics.commit(),
        "versions": metrics.versions(),
        "device": metrics.device_name(world.device),
        "hardware": metrics.hardware(world.device, world.host_cores, len(set(world.host_of)) or 1),
        "precision": job.precision.name,
        "compiled": job.module._compiled_call_impl is not None,
        "cores_per_rank": world.cores,
        "threads": torch.get_num_threads(),
        "decoder_in_c": str(choose_native()),
        "loader_threads": job.train_loader.options.num_threads(),
        "world_size": world.world_size,
        "global_batch_size": job.recipe.train.batch_size,
        "train_samples": job.train_loader.num_samples,
        "val_samples": job.val_loader.num_samples,
        "num_classes": job.train_loader.num_classes,
        "data_sets": _data_sets(job),
        "num_parameters": sum(parameter.numel() for parameter in job.module.parameters()),
        "peak_lr": job.peak_lr,
        "mlperf": mlperf.read_labels(os.environ, recipe),
        "elapsed_s": job.clock.elapsed_s,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
    }


def _data_sets(job: Job) -> list[str]:
    """Return the checksums of the data sets' indices, whatever loads them; without manifests, what loaders tell."""
    folders = [job.data / split for split in SPLITS]
    if all((folder / MANIFEST).is_file() for folder in folders):
        return [Manifest.read(folder).index_checksum for folder in folders]
    return job.data_sets


def describe_ranks(job: Job) -> list[dict[str, Any]] | None:
    """Return where each rank's time went, and the most memory that it had, on the first rank; all must call this."""
    world, time_s = job.world, job.clock.total()
    host = world.host_of[world.rank] if world.host_of else socket.gethostname()
    own = {"rank": world.rank, "host": host, "wait_share": wait_share(time_s), **metrics.memory_bytes(world.device)}
    return gather(world, own | {"time_s": time_s})


def write_end(
    job: Job,
    state: State,
    status: str,
    stopped_by: str | None = None,
    ranks: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write and return the "end" line.

    Args:
        job: The run.
        state: Its progress.
        status: Status with which the run has ended.
        stopped_by: Cause of an interruption; None if there was none.
        ranks: Result of `describe_ranks`; None if the run has failed.
    """
    elapsed_s, time_s = job.clock.elapsed_s, job.clock.total()
    images = state.step * job.recipe.train.batch_size
    end = {
        "status": status,
        "stopped_by": stopped_by,
        "target_accuracy": job.recipe.train.target_accuracy,
        "accuracy": state.accuracy,
        "best_accuracy": state.best_accuracy,
        "time_to_target_s": state.time_to(job.recipe.train.target_accuracy),
        "elapsed_s": elapsed_s,
        "images_per_s": images / job.clock.training_s if images else 0.0,
        "wait_share": wait_share(time_s),
        "time_s": time_s,
        "ranks": ranks,
    }
    job.metrics.write("end", **end)
    return end


def print_result(job: Job, state: State, end: dict[str, Any]) -> None:
    """Print the summary of a run that has come to its end, and whose last file could not be written.

    Args:
        job: The run.
        state: Its progress; where that is not at its end, nothing is printed.
        end: The "end" line.
    """
    settings = job.recipe.train
    reached = state.status(settings.target_accuracy, settings.epochs)
    if reached is not None and job.world.is_main:
        missing = f"not written; `trainer report {job.run} --out DIR` writes it where there is room"
        print(summary(end | {"status": reached}, settings.target_accuracy, missing, job.run, job.recipe.published))


def log_preconditioner(job: Job, state: State) -> None:
    """Write how the preconditioner does.

    The cosines are those of each layer's raw and preconditioned gradient in the last step: 1 where K-FAC only scales.
    """
    preconditioner = job.preconditioner
    if preconditioner is not None:
        counts = preconditioner_counts(preconditioner)
        totals = sum_over_ranks(job.world, [*counts.values()])
        clipped, clip_steps = preconditioner.clipped()  # the same on all ranks
        job.metrics.write(
            "kfac",
            epoch=state.epoch,
            step=state.step,
            elapsed_s=job.clock.elapsed_s,
            cosines=preconditioner.cosines(),
            damping=preconditioner.damping,
            clipped=clipped,
            clip_steps=clip_steps,
            **{name: int(total) for name, total in zip(counts, totals, strict=True)},
        )


def tell_of_preconditioner(job: Job, state: State) -> None:
    """Log what K-FAC has done so far, and after the last epoch what to change where that was nothing."""
    settings, preconditioner = job.recipe.train, job.preconditioner
    assert preconditioner is not None
    if job.steps_per_epoch < settings.log_every and state.step % settings.log_every:
        log_preconditioner(job, state)  # there may be no other line of this epoch
    if not job.world.is_main:
        return
    known = [cosine for cosine in preconditioner.cosines().values() if not math.isnan(cosine)]
    figures = *preconditioner.clipped(), median(known or [math.nan])
    logger.info(describe_kfac(*figures))
    if state.status(settings.target_accuracy, settings.epochs) is not None:
        for line in advise_kfac(*figures, job.recipe.kfac.kl_clip, preconditioner.damping):
            logger.info("%s", line)


def report_run(out: Path) -> Path | None:
    """Write the run's report; return its path. A failure is only logged: training has succeeded all the same."""
    try:
        from ..reporting import page  # it takes a while to load

        return page.write_report([out], out)
    except (DatapipeError, OSError) as error:
        logger.error(
            "no report could be written: %s; `trainer report %s` tries again, with --out DIR elsewhere", error, out
        )
    except Exception:
        logger.exception("no report could be written; `trainer report %s` tries again", out)
    return None
