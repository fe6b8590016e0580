"""The loaders of a run, and whether its recipe fits their data sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from datapipe.console import format_count
from datapipe.dataset.manifest import MANIFEST, find_data_sets
from datapipe.errors import SettingError
from datapipe.loaders import Loader, open_loader
from datapipe.sampling.augment import Augment

from ..config.recipe import Recipe
from ..ranks.world import World, together


def open_loaders(recipe: Recipe, data: Path, world: World, stack: ExitStack) -> tuple[Loader, Loader]:
    """Open the training and the validation loader of this rank.

    Args:
        recipe: The recipe of the run.
        data: Packed data set: the folder that holds train/ and val/.
        world: This process's place among the ranks.
        stack: Stack that closes the loaders.

    Returns:
        (training loader, validation loader).

    Raises:
        DatapipeError: There is no usable data set; all ranks raise this, also where only one has a reason.
        SettingError: The recipe does not fit the data set; all ranks raise this.
    """
    settings, train = recipe.data, recipe.train
    batch_size = world.batch_size(train.batch_size)
    common: dict[str, Any] = {
        "seed": train.seed,
        "rank": world.rank,
        "world_size": world.world_size,
        "device": world.device,
        **settings.loader_settings(),
        "threads": settings.threads or world.cores,
    }
    augment = Augment(crop=settings.crop, flip=settings.flip, pad=settings.pad, scale=settings.area)
    with together(world), _named_as_in_recipe(recipe):
        if (data / MANIFEST).exists():
            raise SettingError(f"--data: {data} is one split; choose the folder that holds it and the others")
        if not (data / "train").exists():
            find_data_sets(data)  # says what is there in its place
        options: dict[str, Any] = {"size": settings.size, "order": settings.order, "augment": augment, **common}
        train_loader = open_loader(data / "train", batch_size, **options)
        stack.enter_context(train_loader)
        train_loader.set_size(settings.size_at(0, train.epochs))
        size = settings.eval_size or settings.size
        val_loader = open_loader(data / "val", batch_size, train=False, size=size, **common)
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
    parts = recipe.train.accumulation_steps
    if train.options.batch_size % parts or train.options.batch_size < 2 * parts:
        raise SettingError(
            f"train.accumulation_steps = {parts}: must divide the {train.options.batch_size} images of a rank into "
            "equal parts of at least 2"
        )
    if len(recipe.data.mean) != train.channels:
        raise SettingError(
            f"data.mean = {list(recipe.data.mean)}: the images have {format_count(train.channels, 'channel')}; it must "
            f"have as many numbers, and data.std too; or pack them again with --channels {len(recipe.data.mean)}"
        )
    if train.channels != val.channels:
        raise SettingError(
            f"--data: training images have {format_count(train.channels, 'channel')}, validation images have "
            f"{val.channels}: pack them again with datapipe pack --channels {len(recipe.data.mean)}"
        )
    if train.num_classes != val.num_classes:
        raise SettingError(
            f"--data: training images have {train.num_classes} classes, validation images {val.num_classes}; they must "
            "agree"
        )
    if train.classes != val.classes and train.classes is not None and val.classes is not None:
        number, *names = next(
            (i, *pair) for i, pair in enumerate(zip(train.classes, val.classes, strict=True)) if len(set(pair)) > 1
        )
        raise SettingError(
            f"class {number} is {names[0]!r} in the training set and {names[1]!r} in the validation set; they must "
            "have the same classes, in the same order"
        )
    if count_classes(recipe, train) < (train.num_classes or 1):
        raise SettingError(
            f"model.num_classes = {recipe.model.num_classes}: must be at least {train.num_classes}, the "
            "number of classes of the data set"
        )


def count_classes(recipe: Recipe, loader: Loader) -> int:
    """Return the number of the network's outputs."""
    num_classes = recipe.model.num_classes or loader.num_classes
    if num_classes is None:
        raise SettingError("model.num_classes is missing: without a manifest nothing says how many classes there are")
    return num_classes
