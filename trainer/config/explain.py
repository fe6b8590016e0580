"""Turns pydantic's findings about a recipe into lines: the setting, its value, what is allowed."""

from __future__ import annotations

import difflib
from typing import get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, recipe: type[BaseModel]) -> str:
    """One line a finding, e.g. `train.epochs = 0: should be greater than or equal to 1`."""
    findings = error.errors(include_url=False)
    inner = {finding["loc"][:depth] for finding in findings for depth in range(len(finding["loc"]))}
    # An array with a bad item is reported twice: for the item, and for having lost it.
    lines = [_line(finding, recipe) for finding in findings if finding["loc"] not in inner]
    return lines[0] if len(lines) == 1 else "\n  ".join(["the recipe has errors:", *dict.fromkeys(lines)])


def _line(finding: dict, recipe: type[BaseModel]) -> str:
    where = tuple(finding["loc"])
    if not where:  # no table, or bytes in it that are no text
        return f"recipe: {finding['msg']}"
    section = _section(recipe, where)
    # A kind is no key: (schedule, step, gamma) is the setting schedule.gamma.
    keys = where[:1] + where[2:] if len(_kinds(recipe, where[0])) > 1 else where
    name = _dotted(keys) or "recipe"
    value = finding["input"]
    match finding["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            known = sorted(section.model_fields) if section else []
            close = difflib.get_close_matches(str(where[-1]), known, 1)
            meant = f", did you mean {close[0]}?" if close else ""
            return f"{name} = {value!r}: unknown setting{meant} (allowed: {', '.join(known)})"
        case "union_tag_not_found":
            return f"{name}.name is missing"
        case "union_tag_invalid":
            return f"{name}.name = {value.get('name')!r}: allowed: {finding['ctx']['expected_tags']}"
        case "value_error" if section is None or isinstance(value, dict):
            return f"{name}: {finding['ctx']['error']}"
        case "value_error":
            return f"{name} = {value!r}: {finding['ctx']['error']}"
    message = finding["msg"].replace("Input should ", "must ")
    return f"{name} = {value!r}: {message}"


def _dotted(keys: tuple) -> str:
    name = ""
    for key in keys:
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else str(key)
    return name


def _section(recipe: type[BaseModel], where: tuple) -> type[BaseModel] | None:
    """The class that the finding's setting belongs to."""
    if len(where) == 1:
        return recipe
    kinds = _kinds(recipe, where[0])
    if len(kinds) == 1:
        return kinds[0]
    return next((kind for kind in kinds if where[1] in get_args(kind.model_fields["name"].annotation)), None)


def _kinds(recipe: type[BaseModel], section: str) -> tuple[type[BaseModel], ...]:
    """The classes that a section may be of: optimizers and schedules have several."""
    annotation = recipe.model_fields[section].annotation if section in recipe.model_fields else None
    kinds = get_args(annotation) or (annotation,)
    return tuple(get_args(kind)[0] if hasattr(kind, "__metadata__") else kind for kind in kinds)
