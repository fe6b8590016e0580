"""Training, top to bottom: steps, epochs, evaluations and checkpoints until the target is reached.

B batch, C channels, H height, W width
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext

import torch
from torch import Tensor

from datapipe.console import Progress
from datapipe.loaders import Batch

from ..errors import DivergedError
from ..optim import set_lr
from ..optim.kfac import set_for_step
from ..ranks.consistency import check_replicas
from ..ranks.stop import StoppedWaiting, StopSignal
from ..ranks.world import averaged_buffers
from ..reporting.runlog import BESIDE_TRAINING
from ..step.precise_bn import estimate_statistics
from .evaluate import Evaluation, evaluate
from .job import Job, check_finite
from .objective import backward, whole_loss
from .record import log_preconditioner, tell_of_preconditioner
from .recovery import Skipper, naming_samples, roll_back
from .saving import save
from .state import State

logger = logging.getLogger(__name__)


def train(job: Job, state: State, stop: StopSignal) -> str:
    """Train from `state` to the end; return target_reached, target_missed, completed or interrupted.

    Whatever the status, the run's checkpoint is then that of `state`.

    Args:
        job: The run.
        state: Its progress, which is changed.
        stop: Says when to stop early.

    Raises:
        DivergedError: A loss or the network is not finite, or a loss is a spike, and the recipe allows no more
            recoveries; the previous checkpoint stays.
        TrainingError: An evaluation did not see every sample once.
        DatapipeError: A loader failed.
    """
    settings = job.recipe.train
    if settings.when_diverged == "roll_back" and state.saved is None:
        save(job, state, may_fail=True)  # there would be nothing to roll back to in the first epoch
    while (status := state.status(settings.target_accuracy, settings.epochs)) is None:
        try:
            with naming_samples(job):
                if not _train_and_evaluate(job, state, stop):
                    return "interrupted"
        except DivergedError as error:
            roll_back(job, state, error)
    return status


def _train_and_evaluate(job: Job, state: State, stop: StopSignal) -> bool:
    """Do the rest of an epoch; return False if it was stopped before its end. Saves a checkpoint."""
    settings = job.recipe.train
    if not train_epoch(job, state, stop):
        save(job, state)
        return False
    evaluation, complete = _evaluate(job, state, stop)
    if not complete:
        save(job, state)  # the epoch's steps are done: a resumed run continues with its evaluation
        return False
    _end_epoch(job, state, evaluation)
    is_last = state.status(settings.target_accuracy, settings.epochs) is not None
    is_best = evaluation is not None and state.accuracy == state.best_accuracy
    save(job, state, may_fail=not is_last, is_best=is_best)
    return True


def train_epoch(job: Job, state: State, stop: StopSignal) -> bool:
    """Do the rest of the epoch's steps; return False if it was stopped before its end.

    Args:
        job: The run.
        state: Its progress, which is changed.
        stop: Says when to stop early.
    """
    settings, last_step = job.recipe.train, (state.epoch + 1) * job.steps_per_epoch
    if state.step == last_step:
        return True
    state.line_begun = state.step, job.clock.training_s
    try:
        with closing(do_steps(job, state, stop.waiting)) as done, _progress(job, state) as progress:
            for _ in done:
                progress.advance(settings.batch_size)
                if state.step % settings.log_every == 0:
                    _write_line(job, state)
                if _is_turn(state.step, settings.check_replicas_every_steps):
                    check_replicas(job.world, job.module, state.step)
                if stop.agreed(_wants_checkpoint(job, state)):
                    return False
                is_due = stop.is_due or _is_turn(state.step, settings.checkpoint_every_steps)
                if is_due and state.step < last_step:
                    save(job, state, may_fail=True)
    except StoppedWaiting:
        stop.agreed()
        return False
    return True


def do_steps(
    job: Job, state: State, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Generator[None, None, None]:
    """Do the rest of the epoch's steps; yield after each.

    Args:
        job: The run.
        state: Its progress, which is changed.
        waiting: Context in which a batch is waited for.
    """
    clock, watch, first = job.clock, job.world.watch, state.step + 1
    update = Skipper(job, _update) if job.recipe.train.when_diverged == "skip" else _update
    job.model.train()
    batches = iter(job.train_loader)  # a generator, although the loader promises only an iterator
    with closing(batches):  # type: ignore[type-var]
        for number in range(first, (state.epoch + 1) * job.steps_per_epoch + 1):
            is_first = number == first  # the loader fills its buffers, kernels are chosen
            watch.doing(f"waiting for the batch of step {number}", is_long=is_first, section=0)
            asked = time.perf_counter()
            with waiting():
                batch = next(batches)
            waited_s = time.perf_counter() - asked

            begin = clock.mark()
            loss = backward(job, state, batch, is_first)
            middle = clock.mark()
            update(job, state, batch, loss, is_first)
            clock.add_step(waited_s, begin, middle, clock.mark())

            state.step = number
            if state.losses.is_full:
                state.losses.read(job.world, state.step)
            yield


def _update(job: Job, state: State, batch: Batch, loss: Tensor, is_long: bool = False) -> None:
    """Update the parameters with their gradients, which are those of `loss`, averaged over the ranks."""
    step, lr = state.step, job.learning_rate(state.step) * state.lr_factor
    job.world.watch.doing(f"update of step {step + 1}", is_long)
    set_lr(job.optimizer, lr)
    max_norm = job.recipe.optimizer.max_grad_norm
    if job.preconditioner is not None or max_norm is not None:
        job.scaler.unscale_(job.optimizer)
    if job.preconditioner is not None:
        set_for_step(job.preconditioner, job.recipe.kfac, step / job.steps_per_epoch, lr)
        if job.adaptive_damping is not None:
            job.adaptive_damping.begin(loss)
        job.preconditioner.step()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(job.module.parameters(), max_norm)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    if job.adaptive_damping is not None:
        job.adaptive_damping.end(lambda: whole_loss(job, batch, step))
    job.optimizer.zero_grad(set_to_none=True)
    job.average.update(step + 1)


def _is_turn(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _wants_checkpoint(job: Job, state: State) -> bool:
    """Return whether the first rank wants a checkpoint, by the time since the last."""
    minutes = job.recipe.train.checkpoint_every_minutes
    return job.world.is_main and minutes is not None and time.monotonic() - state.saved_at > 60 * minutes


def _write_line(job: Job, state: State) -> None:
    """Write how training has done since the last line."""
    state.losses.read(job.world, state.step)
    job.clock.drain()
    step, begun_s = state.line_begun
    images = (state.step - step) * job.recipe.train.batch_size
    job.metrics.write(
        "train",
        epoch=state.epoch,
        step=state.step,
        loss=state.losses.take_line(),
        lr=job.learning_rate(state.step - 1) * state.lr_factor,
        images_per_s=images / (job.clock.training_s - begun_s),
        elapsed_s=job.clock.elapsed_s,
    )
    log_preconditioner(job, state)
    state.line_begun = state.step, job.clock.training_s


def _evaluate(job: Job, state: State, stop: StopSignal) -> tuple[Evaluation | None, bool]:
    """Evaluate if this epoch is due; return (the evaluation or None, whether it was not stopped)."""
    settings, batches = job.recipe.train, iter(range(1, len(job.val_loader) + 1))

    def is_stopped() -> bool:
        number = next(batches)
        job.world.watch.doing(f"evaluating, batch {number}")
        return stop.agreed()

    job.world.watch.doing("evaluating", is_long=True)
    state.losses.read(job.world, state.step)
    job.clock.drain()
    epoch = state.epoch + 1
    if epoch % settings.evaluate_every and epoch < settings.epochs:
        return None, True
    with job.clock.section("evaluation"), job.average.in_place():
        if settings.precise_bn_batches:
            _estimate_statistics(job, epoch)
        with averaged_buffers(job.module, job.world):
            check_finite(job, state)
            job.val_loader.set_epoch(0)
            evaluation = evaluate(
                job.module,
                job.val_loader,
                num_samples=job.val_loader.num_samples,
                world=job.world,
                precision=job.precision,
                stopped=is_stopped,
                with_mirrored=settings.evaluate_mirrored,
            )
    return evaluation, evaluation is not None


def _estimate_statistics(job: Job, epoch: int) -> None:
    """Replace the running statistics by those of the next epoch's first batches; the loader stays where it is."""
    loader, place = job.train_loader, job.train_loader.state_dict()
    loader.set_epoch(epoch)
    batches = iter(loader)
    with closing(batches):  # type: ignore[type-var]
        estimate_statistics(job.module, batches, job.recipe.train.precise_bn_batches, job.precision)
    loader.load_state_dict(place)


def _end_epoch(job: Job, state: State, evaluation: Evaluation | None) -> None:
    """Count the epoch, write its line, and set the loader to the next."""
    state.epoch += 1
    job.world.watch.doing(f"the end of epoch {state.epoch}")
    elapsed_s, time_s = job.clock.elapsed_s, job.clock.epoch()
    train_loss, train_accuracy = state.losses.take_epoch(), state.losses.take_accuracy()
    if evaluation is not None:
        state.evaluations.append(
            {
                "epoch": state.epoch,
                "elapsed_s": elapsed_s,
                "accuracy": evaluation.accuracy,
                "loss": evaluation.loss,
            }
        )
    steps_s = sum(s for section, s in time_s.items() if section not in BESIDE_TRAINING)
    job.metrics.write(
        "epoch",
        epoch=state.epoch,
        step=state.step,
        train_loss=train_loss,
        train_accuracy=train_accuracy,
        val_loss=evaluation.loss if evaluation else None,
        val_accuracy=evaluation.accuracy if evaluation else None,
        images_per_s=job.steps_per_epoch * job.recipe.train.batch_size / steps_s,
        elapsed_s=elapsed_s,
        time_s=time_s,
    )
    accuracy = "" if math.isnan(train_accuracy) else f", training accuracy {train_accuracy:.2%}"
    accuracy += f", validation accuracy {evaluation.accuracy:.2%}" if evaluation else ""
    epochs = job.recipe.train.epochs
    logger.info("epoch %d of %d: loss %.4f%s, %.0f s", state.epoch, epochs, train_loss, accuracy, elapsed_s)
    if job.preconditioner is not None:
        tell_of_preconditioner(job, state)
    job.clock.begin_epoch()
    job.train_loader.set_size(job.recipe.data.size_at(state.epoch, epochs))
    job.train_loader.set_epoch(state.epoch)


def _progress(job: Job, state: State) -> Progress:
    batch_size = job.recipe.train.batch_size
    steps_left = (state.epoch + 1) * job.steps_per_epoch - state.step
    what = f"epoch {state.epoch + 1} of {job.recipe.train.epochs}"
    return Progress(what, steps_left * batch_size, is_shown=job.world.is_main)
