"""Recipes: a TOML file, checked and frozen.

A recipe holds every setting that changes what a run learns. Where the data lies and where the run goes are not
part of it, so that the same recipe can be run elsewhere.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from datapipe.errors import SettingError

from ..models import SMALLEST_INPUT, WITHOUT_STRIDES
from ..optim import Optimizer
from ..optim.kfac import SCHEDULED
from ..optim.kfac import Settings as KfacSettings
from ..optim.schedules import Schedule, last_change
from ..optim.settings import Section
from ..step.ema import EmaSettings
from . import built_in as built_in
from . import find_recipe
from .explain import explain
from .sections import Data, Model, Train

logger = logging.getLogger(__name__)

_EPOCHS = {"schedule": ("warmup_epochs", "milestones"), "kfac": SCHEDULED}  # settings that are, or hold, epochs


class Recipe(Section):
    """Everything that changes what a run learns."""

    name: str
    """Name of the recipe, for messages and reports; the name of the file, where it is left out."""
    source: str = ""
    """Where the figures of the recipe come from."""
    published: str = ""
    """What its source reached with it, which the summary of a run shows beside its own result."""
    data: Data
    """How samples become the network's input."""
    model: Model
    """Which network is trained."""
    optimizer: Optimizer
    """Which optimizer trains it."""
    kfac: Annotated[KfacSettings, Field(validate_default=True)] = KfacSettings()
    """Settings of the preconditioners "kfac" and "ekfac"."""
    ema: EmaSettings = EmaSettings()
    """The average of the network that is evaluated, if there is one."""
    schedule: Schedule
    """How the learning rate changes during the run."""
    train: Train
    """How long, in which steps, and in which arithmetic the network is trained."""

    @field_validator("model")
    @classmethod
    def _takes_the_input(cls, section: Model, info: ValidationInfo) -> Model:
        if section.blur_pool and section.name in WITHOUT_STRIDES:
            raise ValueError(
                f'blur_pool must be false with name = "{section.name}", which drops no pixels but in pooling'
            )
        data, smallest = info.data.get("data"), SMALLEST_INPUT.get(section.name, 0)
        for name in ("size", "start_size", "eval_size") if data is not None else ():
            if (getattr(data, name) or smallest) < smallest:
                size = getattr(data, name)
                raise ValueError(f'name = "{section.name}" takes {smallest} pixels or more, not data.{name} = {size}')
        return section

    @field_validator("kfac")
    @classmethod
    def _fits_the_optimizer(cls, section: KfacSettings, info: ValidationInfo) -> KfacSettings:
        optimizer = info.data.get("optimizer")
        if optimizer is None:
            return section
        if optimizer.preconditioner == "none":
            if section != KfacSettings():
                raise ValueError('without optimizer.preconditioner = "kfac" or "ekfac" nothing uses these settings')
        elif optimizer.ignores_length and section.kl_clip is not None:
            name = f'optimizer.name = "{optimizer.name}"'
            raise ValueError(f'kl_clip must be "none" with {name}, whose steps do not depend on how long gradients are')
        return section

    @field_validator("train")
    @classmethod
    def _ends_after_schedules(cls, section: Train, info: ValidationInfo) -> Train:
        schedule, kfac = info.data.get("schedule"), info.data.get("kfac")
        changes = {}  # the last epoch of each schedule, by what the message says of it
        if schedule is not None:
            name, epoch = last_change(schedule)
            changes[f"schedule.{name} = {epoch:g}"] = epoch
        for name in SCHEDULED if kfac is not None else ():
            epoch = getattr(kfac, name)[-1][0]
            changes[f"{epoch:g}, from which kfac.{name} has its last value"] = epoch
        for text, epoch in changes.items():
            if epoch >= section.epochs:
                how = _how_to_scale(epoch, info)
                raise ValueError(f"epochs = {section.epochs}: must be more than {text}{how}")
        return section

    @field_validator("train")
    @classmethod
    def _sends_gradients_one_way(cls, section: Train, info: ValidationInfo) -> Train:
        optimizer, kfac = info.data.get("optimizer"), info.data.get("kfac")
        if optimizer is None or kfac is None or optimizer.preconditioner == "none" or kfac.grad_worker_fraction:
            return section
        for name, whole in (("gradient_dtype", "float32"), ("powersgd_rank", None)):
            if getattr(section, name) != whole:
                text = f'{name} must be "{whole or "none"}"'
                raise ValueError(f"{text} with kfac.grad_worker_fraction = 0, which sends gradients itself")
        return section


def _how_to_scale(epoch: float, info: ValidationInfo) -> str:
    """Say what to type where an epoch of a schedule does not come before the end of the run."""
    own = (info.context or {}).get("epochs")
    length = own if isinstance(own, int) and own > epoch else "N"
    text = f"to scale a schedule that is for {length} epochs with the run, --set schedule.for_epochs={length}"
    return f". Give an earlier epoch; or, {text}"


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        name: Name of a built-in recipe, or path of a .toml file.
        changes: Settings to change, each as "section.key=value" with a value in TOML's notation.

    Raises:
        SettingError: There is no such recipe, or it is wrong; names each wrong setting, its value and what is allowed.
    """
    path = find_recipe(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"recipe {path} is not TOML: {error}") from error
    table.setdefault("name", path.stem.encode(errors="replace").decode())  # a file's name need not be UTF-8
    own = _own_epochs(table)
    given = {_apply(table, change) for change in changes}
    return parse(table, own, given if "schedule.for_epochs" not in given else ())


def _own_epochs(table: dict[str, Any]) -> object:
    """Return how many epochs a recipe itself has; None where that is not known."""
    return train.get("epochs") if isinstance(train := table.get("train"), dict) else None


def parse(table: dict[str, Any], own_epochs: object = None, given: Collection[str] = ()) -> Recipe:
    """Return the recipe that a table of plain values describes.

    Args:
        table: The recipe, as TOML has it; its schedules are scaled, if it says for which length of the run they are.
        own_epochs: The number of epochs in the recipe's file, for messages.
        given: Settings that do not scale, as they are meant for this run.

    Raises:
        SettingError: It is wrong; names each wrong setting, its value and what is allowed.
    """
    scale_schedules(table, given)
    try:
        # Read as JSON, arrays may become tuples and whole numbers floats; strictness forbids all else.
        return Recipe.model_validate_json(json.dumps(table, default=str), context={"epochs": own_epochs})
    except ValidationError as error:
        problem = SettingError(explain(error, Recipe))
        problem.has_lines = True
        raise problem from error


def scale_schedules(table: dict[str, Any], given: Collection[str] = ()) -> None:
    """Scale a recipe's epochs, in place, if `schedule.for_epochs` says that they are meant for a run of another length.

    `schedule.for_epochs` is the run's own length then. What is not as a recipe must be stays as it is, for the check.

    Args:
        table: The recipe, as TOML has it.
        given: Settings that are meant for this run, such as "schedule.milestones": they do not scale.

    >>> table = {"train": {"epochs": 30}, "schedule": {"for_epochs": 90, "warmup_epochs": 6, "milestones": [30, 60]}}
    >>> scale_schedules(table, given=["schedule.warmup_epochs"])
    >>> table["schedule"]
    {'for_epochs': 30, 'warmup_epochs': 6, 'milestones': [10.0, 20.0]}
    """
    if not isinstance(table, dict):  # but what a checkpoint holds in its place
        return
    sections = {name: value for name in ("train", *_EPOCHS) if isinstance(value := table.get(name), dict)}
    meant, epochs = sections.get("schedule", {}).get("for_epochs"), sections.get("train", {}).get("epochs")
    if not (isinstance(meant, int) and isinstance(epochs, int) and min(meant, epochs) > 0) or meant == epochs:
        return
    changed = []
    for section, names in _EPOCHS.items():
        for name in names:
            value = sections.get(section, {}).get(name)
            scaled = _scale_pairs(value, epochs, meant) if section == "kfac" else _scale(value, epochs, meant)
            if scaled != value and f"{section}.{name}" not in given:
                sections[section][name] = scaled
                changed.append(f"{section}.{name} = {scaled}, not {value}")
    sections["schedule"]["for_epochs"] = epochs
    if changed:
        logger.info("%d epochs, not %d: %s", epochs, meant, "; ".join(changed))


def _scale(value: Any, epochs: int, meant: int) -> Any:
    """Scale an epoch, or each of a list."""
    if isinstance(value, list):
        return [_scale(item, epochs, meant) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    with suppress(OverflowError):  # more than any run has
        return value * epochs / meant
    return value


def _scale_pairs(value: Any, epochs: int, meant: int) -> Any:
    """Scale the epochs of pairs of an epoch and a value; a value alone holds throughout."""
    if not isinstance(value, list):
        return value
    return [[_scale(item[0], epochs, meant), *item[1:]] if isinstance(item, list) and item else item for item in value]


def _apply(table: dict[str, Any], change: str) -> str:
    """Put one `section.key=value`, or `section={...}` for a whole section, into the table; return what is left of =."""
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
    return ".".join([*sections, last])


# What a resumed run may change, by section: when to stop, evaluate or save, how fast to be and which faults to
# tolerate, but not what is learnt.
_MAY_CHANGE = {
    f"{section}{name}"
    for section, names in {
        "": "name source published",
        "schedule.": "for_epochs",
        "data.": "threads cache io max_bad retries timeout_s eval_size",
        "train.": "target_accuracy evaluate_every evaluate_mirrored checkpoint_every_steps checkpoint_every_minutes "
        "keep_checkpoints failed_checkpoints check_replicas_every_steps when_diverged spike_factor max_recoveries "
        "roll_back_lr_factor log_every bucket_mib static_graph compile compile_mode channels_last deterministic",
    }.items()
    for name in names.split()
}


def check_resumable(old: Recipe, new: Recipe) -> None:
    """Refuse to continue with `new` what began with `old`, unless they learn the same.

    `train.epochs` may change where nothing depends on it: the schedule is constant or step, the input does not grow.

    Raises:
        SettingError: Names the settings that differ.
    """
    allowed = set(_MAY_CHANGE)
    if old.schedule.name in ("constant", "step") and old.data.start_size is None:
        allowed.add("train.epochs")
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    differ = [
        f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in allowed
    ]
    if differ:
        text = f"the run to resume was started with another recipe: {'; '.join(differ)}. "
        if old.train.epochs != new.train.epochs and "train.epochs" in allowed:
            text += _how_to_keep_schedules(old, new)
        allowed_names = ", ".join(sorted(allowed))
        raise SettingError(f"{text}Resuming may change only {allowed_names}; start a new run for anything else")


def _how_to_keep_schedules(old: Recipe, new: Recipe) -> str:
    """Say what to type for a run to continue with the schedules that it began with, if these would scale."""
    before, after = (_flatten(recipe.model_dump(mode="json")) for recipe in (old, new))
    keys = [f"{section}.{name}" for section, names in _EPOCHS.items() for name in names]
    options = [f"--set {key}={json.dumps(before[key])}" for key in keys if before.get(key) != after.get(key)]
    return f"To keep its schedule: {' '.join(options)}. " if options else ""


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Return a table of tables as one, with dotted keys."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
