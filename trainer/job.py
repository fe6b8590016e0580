"""Everything a run works with, opened and checked before its first step.

B batch, C channels, H height, W width
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datapipe.console import format_count
from datapipe.dataset.manifest import MANIFEST, find_data_sets
from datapipe.errors import SettingError
from datapipe.loaders import Loader, normalise, open_loader
from datapipe.sampling.augment import Augment

from . import models, optim
from .config.recipe import Recipe
from .distributed import World, settle_buckets, sum_over_ranks, together, wrap
from .errors import DivergedError
from .kfac import KFAC, AdaptiveDamping
from .local_checkpoints import LocalCheckpoints
from .optim import kfac
from .optim.schedules import multiplier, scaled_lr
from .precision import Precision
from .reporting.metrics import MetricsFile
from .reporting.runlog import NAME as METRICS
from .reporting.timing import Clock
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
    scaler: torch.amp.GradScaler
    precision: Precision
    clock: Clock
    metrics: MetricsFile
    local: LocalCheckpoints | None = None  # on the first rank, where the command asks for it

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps per epoch."""
        return len(self.train_loader)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        settings, train = self.recipe.optimizer, self.recipe.train
        peak = scaled_lr(settings.lr, settings.lr_scaling, train.batch_size, settings.lr_batch_size)
        return peak * multiplier(self.recipe.schedule, step, self.steps_per_epoch, train.epochs)

    def prepare(self, images_BCHW: Tensor) -> Tensor:
        """Turn uint8 images into the network's input: float32, normalised, in the chosen memory format."""
        images_BCHW = normalise(images_BCHW, self.recipe.data.mean, self.recipe.data.std)
        return images_BCHW.contiguous(memory_format=_memory_format(self.recipe))


def _memory_format(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.train.channels_last else torch.contiguous_format


def open_loaders(recipe: Recipe, data: Path, world: World, stack: ExitStack) -> tuple[Loader, Loader]:
    """Open the training and the validation loader of this rank.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        world: This process's place among the ranks.
        stack: Closes the loaders.

    Returns:
        (training loader, validation loader).

    Raises:
        DatapipeError: There is no usable data set; all ranks raise this, also where only one has a reason.
        SettingError: The recipe does not fit the data set; all ranks raise this.
    """
    settings, train = recipe.data, recipe.train
    batch_size = world.batch_size(train.batch_size)
    common: dict[str, Any] = {
        "size": settings.size,
        "seed": train.seed,
        "rank": world.rank,
        "world_size": world.world_size,
        "device": world.device,
        **settings.loader_settings(),
    }
    augment = Augment(crop=settings.crop, flip=settings.flip, pad=settings.pad)
    with together(world), _named_as_in_recipe(recipe):
        if (data / MANIFEST).exists():
            raise SettingError(f"--data: {data} is one split; choose the folder that holds it and the others")
        if not (data / "train").exists():
            find_data_sets(data)  # says what is there in its place
        train_loader = open_loader(data / "train", batch_size, order=settings.order, augment=augment, **common)
        stack.enter_context(train_loader)
        val_loader = open_loader(data / "val", batch_size, train=False, **common)
        stack.enter_context(val_loader)
        _check_fit(recipe, train_loader, val_loader)
    return train_loader, val_loader


@contextmanager
def _named_as_in_recipe(recipe: Recipe) -> Iterator[None]:
    """Give a setting of the loader, with whose name an error begins, the name that it has in a recipe."""
    try:
        yield
    except SettingError as error:
        name = str(error).partition(":")[0]
        for section in ("data", "train"):
            if name in type(getattr(recipe, section)).model_fields:
                raise SettingError(f"{section}.{error}") from error
        raise


def _check_fit(recipe: Recipe, train: Loader, val: Loader) -> None:
    """Raise SettingError if the data sets do not fit the recipe, or each other."""
    if train.options.batch_size < 2:
        raise SettingError(
            f"train.batch_size = {recipe.train.batch_size}: leaves one image per rank, from which batch "
            "normalisation learns nothing; must leave at least 2"
        )
    if len(recipe.data.mean) != train.channels:
        raise SettingError(
            f"data.mean = {list(recipe.data.mean)}: the images have {format_count(train.channels, 'channel')}; it must "
            "have as many numbers, and data.std too"
        )
    if (train.channels, train.num_classes) != (val.channels, val.num_classes):
        raise SettingError(
            f"channels and classes: training images have {train.channels} and {train.num_classes}, validation "
            f"images {val.channels} and {val.num_classes}; they must agree"
        )
    if train.classes != val.classes and train.classes is not None and val.classes is not None:
        number, *names = next(
            (i, *pair) for i, pair in enumerate(zip(train.classes, val.classes, strict=True)) if len(set(pair)) > 1
        )
        raise SettingError(
            f"class {number} is {names[0]!r} in the training set and {names[1]!r} in the validation set; they must "
            "have the same classes, in the same order"
        )
    if _num_classes(recipe, train) < (train.num_classes or 1):
        raise SettingError(
            f"model.num_classes = {recipe.model.num_classes}: must be at least {train.num_classes}, the "
            "number of classes of the data set"
        )


def _num_classes(recipe: Recipe, loader: Loader) -> int:
    """Return the number of the network's outputs."""
    num_classes = recipe.model.num_classes or loader.num_classes
    if num_classes is None:
        raise SettingError("model.num_classes is missing: without a manifest nothing says how many classes there are")
    return num_classes


def build_network(recipe: Recipe, world: World, loader: Loader) -> tuple[nn.Module, nn.Module]:
    """Build the network, the same on all ranks, on this rank's device.

    Args:
        recipe: The recipe of the run.
        world: This process's place among the ranks.
        loader: The training loader, which knows the data set's channels and classes.

    Returns:
        (module, model): the network, and what is trained, which averages gradients over several ranks.
    """
    torch.manual_seed(recipe.train.seed)
    num_classes = _num_classes(recipe, loader)
    module = models.build(recipe.model.name, num_classes=num_classes, in_channels=loader.channels)
    memory_format = _memory_format(recipe)
    module = module.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]  # not in torch's types
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    if recipe.train.compile:
        module.compile()  # in place, so that parameters keep their names
    return module, wrap(module, world)


def _settle(recipe: Recipe, world: World, loader: Loader, model: nn.Module, precision: Precision) -> None:
    """Have DDP arrange its buckets, by as few images as BN takes, or those for which the network is compiled."""
    count = loader.options.batch_size if recipe.train.compile else 2
    images_BCHW = torch.zeros(count, loader.channels, recipe.data.size, recipe.data.size, device=world.device)
    with precision.autocast():
        settle_buckets(model, images_BCHW.contiguous(memory_format=_memory_format(recipe)), world)


def build_preconditioner(recipe: Recipe, world: World, model: nn.Module, scaler: torch.amp.GradScaler) -> KFAC | None:
    """Build K-FAC or EKFAC over `model`, if the recipe asks for one.

    Args:
        recipe: The recipe of the run.
        world: This process's place among the ranks.
        model: What is trained.
        scaler: The scaler of the loss, which unscales the gradients before the preconditioner sees them.

    Returns:
        The preconditioner; None if the recipe asks for none.

    Raises:
        SettingError: A setting of the recipe does not fit the network.
    """
    if recipe.optimizer.preconditioner == "none":
        return None
    try:
        return kfac.build(recipe.optimizer.preconditioner, recipe.kfac, model, scaler, world.world_size)
    except ValueError as error:
        raise SettingError(f"kfac: {error}") from error


def open_job(
    recipe: Recipe,
    data: Path,
    run: Path,
    world: World,
    precision: Precision,
    stack: ExitStack,
) -> Job:
    """Open everything except the metrics, which belong to an earlier part of the run until this part is accepted.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        run: Folder of the run.
        world: This process's place among the ranks.
        precision: Arithmetic of the forward pass.
        stack: Closes what is opened.

    Returns:
        The job, with a new network. Its metrics are still to be opened.

    Raises:
        DatapipeError: There is no usable data set.
        SettingError: The recipe does not fit it.
    """
    train_loader, val_loader = open_loaders(recipe, data, world, stack)
    module, model = build_network(recipe, world, train_loader)
    _settle(recipe, world, train_loader, model, precision)
    scaler = precision.scaler()
    preconditioner = build_preconditioner(recipe, world, model, scaler)
    metrics = MetricsFile(run / METRICS if world.is_main else None)
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
        scaler=scaler,
        precision=precision,
        clock=Clock(world.device),
        metrics=metrics,
    )


def read_losses(job: Job, state: State) -> None:
    """Read the losses of the steps so far; all ranks must call this at the same step.

    Raises:
        DivergedError: A loss is not finite, or a spike; all ranks raise this.
    """
    state.losses.read(job.world, state.step)


def check_finite(job: Job, state: State) -> None:
    """Raise DivergedError on all ranks, which must all call this, if a parameter or a buffer is not finite on any."""
    (bad,) = sum_over_ranks(job.world, [float(not is_finite(job.module))])
    if bad:
        raise DivergedError(f"parameters or running statistics are no longer finite after step {state.step}")


def is_finite(module: nn.Module) -> bool:
    """Return whether all parameters and buffers are finite."""
    tensors = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())  # waits once for the device
