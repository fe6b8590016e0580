"""A recipe's schedules in a run of another length than the one that they are meant for."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from ..optim.kfac import SCHEDULED

logger = logging.getLogger(__name__)

EPOCHS = {"schedule": ("warmup_epochs", "milestones"), "kfac": SCHEDULED}  # settings that are, or hold, epochs


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
    sections = {name: value for name in ("train", *EPOCHS) if isinstance(value := table.get(name), dict)}
    meant, epochs = sections.get("schedule", {}).get("for_epochs"), sections.get("train", {}).get("epochs")
    if not (isinstance(meant, int) and isinstance(epochs, int) and min(meant, epochs) > 0) or meant == epochs:
        return
    changed = []
    for section, names in EPOCHS.items():
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
