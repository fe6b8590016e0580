"""Everything a run works with, opened and checked before its first step.

B batch, C channels, H height, W width
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from datapipe.errors import SettingError
from datapipe.loaders import Loader, normalise
from datapipe.loaders.device import Normaliser

from .. import models, optim
from ..checkpoints.local import LocalCheckpoints
from ..config.recipe import Recipe
from ..errors import DivergedError
from ..kfac import KFAC, AdaptiveDamping
from ..models.whitened import WhitenedNet, patch_moments
from ..optim import kfac
from ..optim.schedules import multiplier, scaled_lr
from ..ranks.consistency import check_setup
from ..ranks.world import World, sum_over_ranks, wrap
from ..reporting.metrics import MetricsFile
from ..reporting.runlog import NAME as METRICS
from ..reporting.timing import Clock
from ..step.ema import Average
from ..step.losses import begin_bias
from ..step.precision import Precision, kernels_chosen
from .loading import count_classes, open_loaders
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
    if train.compile:
        module.compile(mode=train.compile_mode)  # in place, so that parameters keep their names
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


def open_job(
    recipe: Recipe,
    data: Path,
    run: Path,
    world: World,
    precision: Precision,
    clock: Clock,
    stack: ExitStack,
) -> Job:
    """Open everything except the metrics, which belong to an earlier part of the run until this part is accepted.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        run: Folder of the run.
        world: This process's place among the ranks.
        precision: Arithmetic of the forward pass.
        clock: Clock that tells where the time goes, since the run began.
        stack: Stack that closes what is opened.

    Returns:
        The job, with a new network. Its metrics are still to be opened.

    Raises:
        DatapipeError: There is no usable data set.
        SettingError: The recipe does not fit it.
        TrainingError: A rank has another recipe, data set, or other software; see `check_setup`.
    """
    world.watch.doing("opening the data set", is_long=recipe.data.backend == "resident")  # which it decodes
    train_loader, val_loader = open_loaders(recipe, data, world, stack)
    loaders = {"train": train_loader, "val": val_loader}
    check_setup(world, recipe, {name: str(loader.identity()["data_set"]) for name, loader in loaders.items()})
    world.watch.doing("building the network", is_long=True)
    precision.set_up()
    stack.enter_context(kernels_chosen(recipe.train.deterministic))
    module, model = build_network(recipe, world, train_loader)
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
