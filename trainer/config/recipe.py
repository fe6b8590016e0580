"""Recipes: a TOML file, checked and frozen.

A recipe holds every setting that changes what a run learns. Where the data lies and where the run goes are not
part of it, so that the same recipe can be run elsewhere.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from datapipe.errors import SettingError
from datapipe.names import BACKENDS, ORDERS, Crop, Flip, Io

from .. import models
from ..fields import BelowOne, Count, Fraction, Positive, Section, one_of, or_none
from ..optim import Optimizer
from ..optim.kfac import Settings as KfacSettings
from ..optim.schedules import Schedule
from . import built_in
from .explain import explain

POLICIES = "stop", "skip", "roll_back"

_CountFromZero = Annotated[int, Field(ge=0)]
# Not empty, which is what an unset variable leaves, and would mean the current folder.
_Folder = Annotated[str, Field(min_length=1)]


class Data(Section):
    """How samples become the network's input.

    The settings from `cache` on, and `threads`, are those of `open_loader`; "none" leaves a setting to it.
    """

    size: Annotated[int, Field(ge=8, le=4096)]
    """Side of the square input, in pixels."""
    mean: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=3)]
    """Mean of each channel, of pixel values from 0 to 1."""
    std: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, max_length=3)]
    """Standard deviation of each channel, of pixel values from 0 to 1; as many numbers as `mean` has."""
    crop: Crop = "auto"
    """How training images are cropped; "auto": "pad" where all images have the input's size, else "random_resized"."""
    flip: Flip = True
    """Mirror each training image, left to right, with probability ½; "alternate": in every other epoch."""
    pad: Annotated[int, Field(ge=0, le=64)] = 4
    """With `crop = "pad"`: width of the black border around an image before the crop, in pixels."""
    threads: Annotated[Count | None, or_none()] = None
    """Threads per rank that read and decode; "none": the node's cores, shared by its ranks."""
    backend: Annotated[str, one_of("backend", BACKENDS)] = "cpu"
    """Which loader decodes the images."""
    order: Annotated[str, one_of("order", ORDERS)] = "full"
    """Order of the training images; "full": a uniform permutation; "blocks": large reads, each byte once per epoch."""
    cache: Annotated[_Folder | None, or_none()] = None
    """Folder on each node to which the data set is staged before training; "none": no staging."""
    io: Annotated[Io | None, or_none()] = None
    """How shards are read; "cached": through the page cache; "mmap": memory-mapped; "direct": with O_DIRECT."""
    block_mib: Annotated[Count | None, or_none()] = None
    """With `order = "blocks"`: size of a block, in MiB."""
    max_bad: Annotated[_CountFromZero | None, or_none()] = None
    """Number of unreadable images that each rank tolerates, in training and in validation; one more is an error."""
    retries: Annotated[_CountFromZero | None, or_none()] = None
    """How often an open or a read that fails is tried again."""
    timeout_s: Annotated[Positive | None, or_none()] = None
    """How long a batch, or opening the data set, may take, in seconds; longer is an error."""

    def loader_settings(self) -> dict[str, Any]:
        """Return those arguments of `open_loader` that the recipe does not leave to it."""
        names = ("threads", "backend", "cache", "io", "block_mib", "max_bad", "retries", "timeout_s")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _same_channels(self) -> Data:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; one per channel")
        return self


class Model(Section):
    """Which network is trained."""

    name: Annotated[str, one_of("model", tuple(models.REGISTRY))]
    """Name of the network."""
    num_classes: Annotated[Count | None, or_none()] = None
    """Number of outputs; "none": the number of classes of the data set."""


class Train(Section):
    """How long, in which steps, and in which arithmetic the network is trained."""

    epochs: Count
    """How often the run goes through the training images, at most."""
    batch_size: Count
    """Images per step, over all ranks; a multiple of the number of ranks."""
    precision: Literal["auto", "bf16", "fp16", "off"] = "auto"
    """Arithmetic of the forward pass; "auto": "bf16" where the device computes in it natively, else "off" (float32).

    "fp16", with loss scaling, needs a GPU.
    """
    channels_last: bool = True
    """Keep images and weights with the channels last in memory."""
    compile: bool = False
    """Compile the network with `torch.compile`."""
    label_smoothing: BelowOne = 0.0
    """Probability that is taken from the label's class and shared by all classes."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the weights, the order, the crops and the flips."""
    target_accuracy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, or_none()] = None
    """Stop when this fraction of the validation images is classified correctly; "none": train for all epochs."""
    evaluate_every: Count = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every_steps: Annotated[Count | None, or_none()] = None
    """Steps between checkpoints within an epoch, beside those by time; "none": none."""
    checkpoint_every_minutes: Annotated[Annotated[float, Field(gt=0)] | None, or_none()] = 10.0
    """Minutes between checkpoints within an epoch; "none": at the ends of epochs, and by steps."""
    keep_checkpoints: Count = 2
    """How many of the last checkpoints are kept, in case the last one is damaged. That of the best epoch is, too."""
    failed_checkpoints: Annotated[int, Field(ge=0)] = 3
    """How many checkpoints in a row may fail, as on a full disk, before the run ends."""
    check_replicas_every_steps: Annotated[Count | None, or_none()] = 1000
    """Steps between comparisons of all ranks' parameters, which find bits that memory has changed; "none": none."""
    when_diverged: Annotated[str, one_of("policy", POLICIES)] = "stop"
    """What to do after a loss that is not finite, or a spike; "stop": end with an error; "skip": leave the step out;
    "roll_back": continue from the last checkpoint with a lower learning rate.

    With "skip" the host waits for each step, and its loss is known on all ranks, before the parameters are updated.
    """
    spike_factor: Annotated[Annotated[float, Field(gt=1)] | None, or_none()] = None
    """How many times the median loss of the last 100 steps a loss must be to count as a spike; "none": spikes are not
    looked for."""
    max_recoveries: Count = 10
    """How many steps are skipped, or how often the run is rolled back, before it ends with an error."""
    roll_back_lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """By which the learning rate is multiplied each time that the run is rolled back."""
    log_every: Count = 50
    """Steps between lines of metrics.jsonl."""


class Recipe(Section):
    """Everything that changes what a run learns."""

    name: str
    """Name of the recipe, for messages and reports; the name of the file, where it is left out."""
    source: str = ""
    """Where the figures of the recipe come from."""
    data: Data
    """How samples become the network's input."""
    model: Model
    """Which network is trained."""
    optimizer: Optimizer
    """Which optimizer trains it."""
    kfac: KfacSettings = KfacSettings()
    """Settings of the preconditioners "kfac" and "ekfac"."""
    schedule: Schedule
    """How the learning rate changes during the run."""
    train: Train
    """How long, in which steps, and in which arithmetic the network is trained."""

    @field_validator("kfac")
    @classmethod
    def _has_preconditioner(cls, section: KfacSettings, info: ValidationInfo) -> KfacSettings:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.preconditioner == "none" and section != KfacSettings():
            raise ValueError('without optimizer.preconditioner = "kfac" or "ekfac" nothing uses these settings')
        return section


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        name: Name of a built-in recipe, or path of a .toml file.
        changes: Settings to change, each as "section.key=value" with a value in TOML's notation.

    Raises:
        SettingError: There is no such recipe, or it is wrong; names each wrong setting, its value and what is allowed.
    """
    path = built_in().get(name, Path(name))
    if not path.is_file():
        raise SettingError(f"recipe {name!r} is not a file, and not built in; built in: {', '.join(built_in())}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"recipe {path} is not TOML: {error}") from error
    table.setdefault("name", path.stem.encode(errors="replace").decode())  # a file's name need not be UTF-8
    for change in changes:
        _apply(table, change)
    return parse(table)


def parse(table: dict[str, Any]) -> Recipe:
    """Return the recipe that a table of plain values describes. Raises SettingError."""
    try:
        # Read as JSON, arrays may become tuples and whole numbers floats; strictness forbids all else.
        return Recipe.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise SettingError(explain(error, Recipe)) from error


def _apply(table: dict[str, Any], change: str) -> None:
    """Put one `section.key=value`, or `section={...}` for a whole section, into the table."""
    key, equals, text = change.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last or not all(sections):
        raise SettingError(f"--set {change}: must read section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set model.name=resnet18
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise SettingError(f"--set {change}: {section} is not a section")
    table[last] = value


# What a resumed run may change: when to stop, evaluate or save, how fast to be and which faults to tolerate, but not
# what is learnt.
MAY_CHANGE = {
    "name",
    "source",
    "data.threads",
    "data.cache",
    "data.io",
    "data.max_bad",
    "data.retries",
    "data.timeout_s",
    "train.target_accuracy",
    "train.evaluate_every",
    "train.checkpoint_every_steps",
    "train.checkpoint_every_minutes",
    "train.keep_checkpoints",
    "train.failed_checkpoints",
    "train.check_replicas_every_steps",
    "train.when_diverged",
    "train.spike_factor",
    "train.max_recoveries",
    "train.roll_back_lr_factor",
    "train.log_every",
    "train.compile",
    "train.channels_last",
}


def check_resumable(old: Recipe, new: Recipe) -> None:
    """Refuse to continue with `new` what began with `old`, unless they learn the same.

    `train.epochs` may change where the schedule does not depend on it (constant, step).

    Raises:
        SettingError: Names the settings that differ.
    """
    allowed = set(MAY_CHANGE)
    if old.schedule.name in ("constant", "step"):
        allowed.add("train.epochs")
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    differ = [
        f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in allowed
    ]
    if differ:
        raise SettingError(
            f"the run to resume was started with another recipe: {'; '.join(differ)}. Resuming may change "
            f"only {', '.join(sorted(allowed))}; start a new run for anything else"
        )


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Return a table of tables as one, with dotted keys."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
