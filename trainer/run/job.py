"""Everything a run works with, opened and checked before its first step.

B batch, C channels, H height, W width
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from datapipe.checks import check_apart
from datapipe.cluster import rank_placement
from datapipe.errors import SettingError
from datapipe.fsio import make_folder
from datapipe.loaders import Loader, normalise
from datapipe.loaders.device import Normaliser
from datapipe.staging import StageOptions, stage

from .. import models, optim
from ..checkpoints.local import LocalCheckpoints
from ..config.recipe import Recipe
from ..errors import DivergedError
from ..kfac import KFAC, AdaptiveDamping
from ..models.whitened import WhitenedNet, patch_moments
from ..optim import kfac
from ..optim.schedules import multiplier, scaled_lr
from ..ranks.connection import connected
from ..ranks.consistency import check_setup, check_start
from ..ranks.device import set_threads
from ..ranks.heartbeat import RANK_TIMEOUT_S
from ..ranks.memory import keep_freed_memory
from ..ranks.world import World, sum_over_ranks, wrap
from ..reporting.metrics import MetricsFile
from ..reporting.runlog import NAME as METRICS
from ..reporting.timing import Clock
from ..step.ema import Average
from ..step.losses import begin_bias
from ..step.precision import Precision, choose_precision, kernels_chosen
from .loading import count_classes, open_loaders
from .saver import Saver
from .state import State


@dataclass(frozen=True)
class Job:
    """The objects that stay the same throughout a run. `model` is what is trained, `module` the network within."""

    recipe: Recipe
    world: World
    data: Path
    run: Path
    train_loader: Loader
    val_loader: Loader
    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    preconditioner: KFAC | None
    adaptive_damping: AdaptiveDamping | None
    average: Average
    scaler: torch.amp.GradScaler
    precision: Precision
    clock: Clock
    metrics: MetricsFile
    saver: Saver
    local: LocalCheckpoints | None = None  # on the first rank, where the command asks for it

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps per epoch."""
        return len(self.train_loader)

    @property
    def data_sets(self) -> list[str]:
        """Return what identifies the training set and the validation set, as their loaders tell."""
        return [str(loader.identity()["data_set"]) for loader in (self.train_loader, self.val_loader)]

    @property
    def peak_lr(self) -> float:
        """Return the learning rate that the schedule multiplies."""
        settings, batch_size = self.recipe.optimizer, self.recipe.train.batch_size
        return scaled_lr(settings.lr, settings.lr_scaling, batch_size, settings.lr_batch_size)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        return self.peak_lr * multiplier(self.recipe.schedule, step, self.steps_per_epoch, self.recipe.train.epochs)


def build_network(recipe: Recipe, world: World, loader: Loader) -> tuple[nn.Module, nn.Module]:
    """Build the network, the same on all ranks, on this rank's device: pixels [B, C, H, W], 0 to 255 -> logits [B, K].

    It normalises them itself, in front of its first layer, so that this is compiled with the rest.

    Args:
        recipe: The recipe of the run.
        world: This process's place among the ranks.
        loader: The training loader, which knows the data set's channels and classes.

    Returns:
        (module, model): the network, and what is trained, which averages gradients over several ranks.
    """
    torch.manual_seed(recipe.train.seed)
    settings = recipe.model
    module = models.build(
        settings.name,
        num_classes=count_classes(recipe, loader),
        in_channels=loader.channels,
        blur_pool=settings.blur_pool,
    )
    begin_bias(recipe.train.loss, module)
    if isinstance(module, WhitenedNet):
        images_BCHW = normalise(next(iter(loader)).images, recipe.data.mean, recipe.data.std).cpu()
        loader.set_epoch(0)
        moments_nn = patch_moments(images_BCHW)
        total = sum_over_ranks(world, moments_nn.flatten().tolist())  # each has seen its part of the batch
        module.whiten(torch.tensor(total, dtype=torch.float64).view_as(moments_nn) / world.world_size)
    train = recipe.train
    memory_format = torch.channels_last if train.channels_last else torch.contiguous_format
    module = module.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]  # not in torch's types
    normaliser = Normaliser(recipe.data.mean, recipe.data.std, world.device)
    # Not by a hook, which would be compiled as a graph of its own.
    module.forward = partial(_forward, module.forward, normaliser, memory_format)
    names = ("bucket_mib", "gradient_dtype", "static_graph", "powersgd_rank", "powersgd_start_step")
    return module, wrap(module, world, **{name: getattr(train, name) for name in names})


def _forward(
    forward: Callable[[Tensor], Tensor], normaliser: Normaliser, memory_format: torch.memory_format, pixels_BCHW: Tensor
) -> Tensor:
    return forward(normaliser(pixels_BCHW).contiguous(memory_format=memory_format))


def build_preconditioner(recipe: Recipe, world: World, model: nn.Module, scaler: torch.amp.GradScaler) -> KFAC | None:
    """Build K-FAC or EKFAC over `model`, if the recipe asks for one.

    Args:
        recipe: The recipe of the run.
        world: This process's place among the ranks.
        model: Network that is trained.
        scaler: The scaler of the loss, which unscales the gradients before the preconditioner sees them.

    Returns:
        The preconditioner; None if the recipe asks for none.

    Raises:
        SettingError: A setting of the recipe does not fit the network.
    """
    if recipe.optimizer.preconditioner == "none":
        return None
    parts = recipe.train.accumulation_steps
    try:
        return kfac.build(recipe.optimizer.preconditioner, recipe.kfac, model, scaler, world.world_size, parts)
    except ValueError as error:
        raise SettingError(f"kfac: {error}") from error


@contextmanager
def open_world(
    recipe: Recipe,
    data: Path,
    run: Path,
    clock: Clock,
    device: str = "auto",
    local: Path | None = None,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> Iterator[World]:
    """Stage the data set, if it is to be, and connect the ranks for as long as the block runs; see `connected`.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        run: Folder of the run.
        clock: Clock of the run.
        device: Device to train on: auto, cpu or cuda.
        local: Folder on each node's own disk, to which the data set is staged first; None: it is not staged.
        rank_timeout_s: Longest time that a rank may do nothing, in seconds.

    Yields:
        This process's place among the ranks, ready to compute on its device.

    Raises:
        SettingError: A setting is wrong; with several ranks, on all of them.
        DatapipeError: The data set could not be staged, or a rank did not come.
    """
    if run.exists() and not run.is_dir():
        raise SettingError(f"--out {run}: is a file; it must be a folder, or not exist yet")
    check_apart("--out", run, "--data", data)
    place = rank_placement(os.environ)
    World(world_size=place.world_size).batch_size(recipe.train.batch_size)
    if local is not None:
        check_apart("--out", run, "--stage", local)
        with clock.section("staging"):
            stage(data, local, StageOptions(placement=place))
    with connected(place, device, rank_timeout_s, run, after_staging=local is not None) as world:
        set_threads(world)
        if world.device.type == "cpu":
            keep_freed_memory()
        clock.use(world.device)
        yield world


def make_run_folder(run: Path, stack: ExitStack) -> None:
    """Make the folder of a run. If it is new, and still empty when `stack` closes, it is removed."""
    if not run.exists():
        stack.callback(_remove_if_empty, run)
    make_folder(run)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # something is in it
        folder.rmdir()


def open_job(recipe: Recipe, data: Path, run: Path, world: World, clock: Clock, stack: ExitStack) -> Job:
    """Open everything except the metrics, which belong to an earlier part of the run until this part is accepted.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        run: Folder of the run.
        world: This process's place among the ranks.
        clock: Clock that tells where the time goes, since the run began.
        stack: Stack that closes what is opened.

    Returns:
        The job, with a new network. Its metrics are still to be opened.

    Raises:
        DatapipeError, SettingError: There is no usable data set, or the recipe does not fit it.
        TrainingError: A rank has another recipe, data set, software, or initial parameters; see `check_setup`.
    """
    precision = choose_precision(recipe.train.precision, world.device, recipe.train.powersgd_rank is None)
    world.watch.doing("opening the data set", is_long=recipe.data.backend == "resident")  # which it decodes
    train_loader, val_loader = open_loaders(recipe, data, world, stack)
    loaders = {"train": train_loader, "val": val_loader}
    check_setup(world, recipe, {name: str(loader.identity()["data_set"]) for name, loader in loaders.items()})
    world.watch.doing("building the network", is_long=True)
    precision.set_up()
    stack.enter_context(kernels_chosen(recipe.train.deterministic))
    module, model = build_network(recipe, world, train_loader)
    check_start(world, module)
    scaler = precision.scaler()
    preconditioner = build_preconditioner(recipe, world, model, scaler)
    metrics = MetricsFile(run / METRICS if world.is_main else None, world.watch.at)
    stack.callback(metrics.close)
    return Job(
        recipe=recipe,
        world=world,
        data=data,
        run=run,
        train_loader=train_loader,
        val_loader=val_loader,
        module=module,
        model=model,
        optimizer=optim.build(recipe.optimizer, module),
        preconditioner=preconditioner,
        adaptive_damping=kfac.adaptive_damping(recipe.kfac, preconditioner),
        average=Average(module, recipe.ema),
        scaler=scaler,
        precision=precision,
        clock=clock,
        metrics=metrics,
        saver=Saver(world),
    )


def check_finite(job: Job, state: State) -> None:
    """Raise DivergedError on all ranks, which must all call this, if a parameter or a buffer is not finite on any."""
    (bad,) = sum_over_ranks(job.world, [float(not is_finite(job.module))])
    if bad:
        raise DivergedError(f"parameters or running statistics are no longer finite after step {state.step}")


def is_finite(module: nn.Module) -> bool:
    """Return whether all parameters and buffers are finite."""
    tensors = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())  # waits once for the device
