"""Recipes: a TOML file, checked and frozen.

A recipe holds every setting that changes what a run learns. Where the data lies and where the run goes
are no part of it, so that the same recipe can be run elsewhere.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from datapipe.errors import SettingError
from datapipe.names import BACKENDS, ORDERS, Crop, Io

from .. import models
from ..fields import BelowOne, Count, Fraction, Positive, Section, one_of, or_none
from ..optim import Optimizer
from .explain import explain

BUILT_IN = Path(__file__).parents[1] / "recipes"


_FromZero = Annotated[int, Field(ge=0)]
_Folder = Annotated[str, Field(min_length=1)]  # not what an unset variable leaves, which is the current one


class Data(Section):
    """How samples become input: `size` in pixels, `mean` and `std` per channel of values in 0..1.

    The settings from `cache` on are those of `open_loader`, for either loader; none is its default. `cache` is a folder
    on each node.
    """

    size: Annotated[int, Field(ge=8, le=4096)]
    mean: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=3)]
    std: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, max_length=3)]
    crop: Crop = "auto"
    flip: bool = True
    pad: Annotated[int, Field(ge=0, le=64)] = 4
    threads: Annotated[Count | None, or_none()] = None
    backend: Annotated[str, one_of("backend", BACKENDS)] = "cpu"
    order: Annotated[str, one_of("order", ORDERS)] = "full"
    cache: Annotated[_Folder | None, or_none()] = None
    io: Annotated[Io | None, or_none()] = None
    block_mib: Annotated[Count | None, or_none()] = None
    max_bad: Annotated[_FromZero | None, or_none()] = None
    retries: Annotated[_FromZero | None, or_none()] = None
    timeout_s: Annotated[Positive | None, or_none()] = None

    def loader_settings(self) -> dict[str, object]:
        """Those arguments of `open_loader` that are not left to it."""
        names = ("threads", "backend", "cache", "io", "block_mib", "max_bad", "retries", "timeout_s")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _same_channels(self) -> Data:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; one per channel")
        return self


class Model(Section):
    """Which network; `num_classes` is the data set's unless given."""

    name: Annotated[str, one_of("model", tuple(models.REGISTRY))]
    num_classes: Annotated[Count | None, or_none()] = None


def _pairs(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return ((0, value),)


def _from_the_beginning(pairs: tuple) -> tuple:
    starts = [start for start, _ in pairs]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError("must be one value, or pairs of an epoch and a value, with epochs that rise from 0")
    return pairs


_Epoch = Annotated[float, Field(ge=0)]
_Pairs = BeforeValidator(_pairs), AfterValidator(_from_the_beginning)


class Kfac(Section):
    """For the preconditioners "kfac" and "ekfac". Damping and the two intervals may change with the epoch:
    [[0, 0.03], [10, 0.003]]. With `damping_update_steps`, damping adapts that often (see trainer.kfac.AdaptiveDamping).
    `grad_worker_fraction` 0: one rank for each layer.
    """

    damping: Annotated[tuple[tuple[_Epoch, Positive], ...], *_Pairs] = ((0, 0.003),)
    factor_update_steps: Annotated[tuple[tuple[_Epoch, Count], ...], *_Pairs] = ((0, 10),)
    inv_update_steps: Annotated[tuple[tuple[_Epoch, Count], ...], *_Pairs] = ((0, 100),)
    damping_update_steps: Annotated[Count | None, or_none()] = None
    factor_decay: BelowOne = 0.95
    kl_clip: Annotated[Positive | None, or_none()] = 0.001
    factor_fraction: Annotated[Positive, Field(le=1)] = 1.0
    spatially_uncorrelated: bool = False
    inv_dtype: Annotated[Literal["bfloat16"] | None, or_none()] = None
    solver: Literal["eigen", "cholesky"] = "eigen"
    stagger: bool = True
    grad_worker_fraction: Fraction = 1.0
    local_factors: bool = False
    skip: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_rule_for_damping(self) -> Kfac:
        if self.damping_update_steps is not None and len(self.damping) > 1:
            raise ValueError("damping changes with the epoch, and damping_update_steps adapts it: only one of the two")
        return self


class _Schedule(Section):
    """Warm-up is linear in steps from `warmup_start` (a fraction of the peak) to the peak."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    warmup_start: Fraction = 0.0


class ConstantSchedule(_Schedule):
    name: Literal["constant"]


class StepSchedule(_Schedule):
    """Times `gamma` at each of `milestones` (epochs, rising)."""

    name: Literal["step"]
    milestones: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _rising(self) -> StepSchedule:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones = {list(self.milestones)}: must rise")
        return self


class CosineSchedule(_Schedule):
    """Half a cosine from the peak, after the warm-up, to the fraction `final` of it."""

    name: Literal["cosine"]
    final: Fraction = 0.0


class OneCycleSchedule(Section):
    """Linear from `start` to the peak at the fraction `peak_at` of the run, then linear to `final`."""

    name: Literal["onecycle"]
    peak_at: Annotated[float, Field(gt=0, lt=1)] = 0.3
    start: Fraction = 0.0
    final: Fraction = 0.0


Schedule = Annotated[ConstantSchedule | StepSchedule | CosineSchedule | OneCycleSchedule, Field(discriminator="name")]


class Train(Section):
    """`batch_size` is global: over all ranks. `checkpoint_every_steps` none: at the ends of epochs only."""

    epochs: Count
    batch_size: Count
    precision: Literal["auto", "bf16", "fp16", "off"] = "auto"
    channels_last: bool = True
    compile: bool = False
    label_smoothing: BelowOne = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    target_accuracy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, or_none()] = None
    evaluate_every: Count = 1
    checkpoint_every_steps: Annotated[Count | None, or_none()] = None
    log_every: Count = 50


class Recipe(Section):
    """Everything that changes what a run learns; `source` says where its figures come from."""

    name: str
    source: str = ""
    data: Data
    model: Model
    optimizer: Optimizer
    kfac: Kfac = Kfac()
    schedule: Schedule
    train: Train

    @field_validator("kfac")
    @classmethod
    def _has_preconditioner(cls, kfac: Kfac, info: ValidationInfo) -> Kfac:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.preconditioner == "none" and kfac != Kfac():
            raise ValueError('without optimizer.preconditioner = "kfac" or "ekfac" nothing uses these settings')
        return kfac


def built_in() -> dict[str, Path]:
    """The recipes that come with the package: name -> TOML file, by name."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe `name`, built in or the path of a .toml file, with `changes` ("section.key=value").

    Raises SettingError, naming each setting that is wrong, its value and what is allowed.
    """
    path = built_in().get(name, Path(name))
    if not path.is_file():
        raise SettingError(f"recipe {name!r} is no file, and not built in; built in: {', '.join(built_in())}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"recipe {path} is no TOML: {error}") from error
    table.setdefault("name", path.stem.encode(errors="replace").decode())  # a file's name need not be UTF-8
    for change in changes:
        _apply(table, change)
    return parse(table)


def parse(table: dict) -> Recipe:
    """The recipe that a table of plain values describes. Raises SettingError."""
    try:
        # As JSON, arrays may become tuples and whole numbers floats; strictness forbids all else.
        return Recipe.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise SettingError(explain(error, Recipe)) from error


def _apply(table: dict, change: str) -> None:
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
            raise SettingError(f"--set {change}: {section} is no section")
    table[last] = value


# What a resumed run may change: when to stop, look or save, how fast to be and what to bear, but not what is learnt.
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
    "train.log_every",
    "train.compile",
    "train.channels_last",
}


def check_resumable(old: Recipe, new: Recipe) -> None:
    """Refuse to go on with `new` what began with `old`, unless they learn the same.

    `train.epochs` may change where the schedule does not depend on it (constant, step). Raises SettingError
    naming the settings that differ.
    """
    allowed = set(MAY_CHANGE)
    if old.schedule.name in ("constant", "step"):
        allowed.add("train.epochs")
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
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


def _flat(table: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
