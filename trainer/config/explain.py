"""Pydantic's findings about a recipe as lines: the setting, its value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from datapipe.checks import did_you_mean
from datapipe.console import printable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]  # keys, from the outside in, and the index in an array


def explain(error: ValidationError, recipe: type[BaseModel]) -> str:
    """Return one line per finding, e.g. `train.epochs = 0: must be greater than or equal to 1`."""
    findings = error.errors(include_url=False)
    inner = {finding["loc"][:depth] for finding in findings for depth in range(len(finding["loc"]))}
    # An array with a bad item is reported twice: for the item, and for having lost it.
    findings = [finding for finding in findings if finding["loc"] not in inner]
    lines = [_line(finding, recipe) for finding in findings]
    lines = [*dict.fromkeys(lines), *dict.fromkeys(_how_to_change_kind(findings, recipe))]
    lines = [*map(printable, lines)]
    return "; ".join(lines) if len(findings) == 1 else "\n  ".join(["the recipe has errors:", *lines])


def _line(finding: ErrorDetails, recipe: type[BaseModel]) -> str:
    location = finding["loc"]
    if not location:  # not a table, or bytes in it that are not text
        return f"recipe: {finding['msg']}"
    section = _section(recipe, location)
    # A kind is not a key: (schedule, step, gamma) is the setting schedule.gamma.
    keys = location[:1] + location[2:] if len(section_classes(recipe, location[0])) > 1 else location
    name = _dotted(keys) or "recipe"
    value = finding["input"]
    match finding["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            known = sorted(section.model_fields) if section else []
            return f"{name} = {value!r}: unknown setting{_hint(location, known, recipe)} (allowed: {', '.join(known)})"
        case "union_tag_not_found":
            return f"{name}.name is missing"
        case "union_tag_invalid":
            kinds = section_classes(recipe, str(location[0]))
            known = [kind for each in kinds for kind in get_args(each.model_fields["name"].annotation)]
            hint = did_you_mean(str(value.get("name")), known)
            return f"{name}.name = {value.get('name')!r}: allowed: {', '.join(known)}{hint}"
        case "value_error" if section is None or isinstance(value, dict | BaseModel):
            return f"{name}: {finding['ctx']['error']}"
        case "value_error":
            return f"{name} = {value!r}: {finding['ctx']['error']}"
    message = finding["msg"].replace("Input should ", "must ")
    return f"{name} = {value!r}: {message}{_meant(finding)}"


def _meant(finding: ErrorDetails) -> str:
    """Say what a mistyped word, or a number that is written otherwise, may mean; "" where that is not known."""
    value, most = finding["input"], finding.get("ctx", {}).get("le", finding.get("ctx", {}).get("lt"))
    if isinstance(value, str) and re.fullmatch("-?[0-9]+,[0-9]+", value):
        return f"; did you mean {value.replace(',', '.')}?"
    if finding["type"] == "literal_error":
        return did_you_mean(str(value), re.findall("'([^']+)'", finding["ctx"]["expected"]))
    if most == 1 and isinstance(value, int | float) and 1 < value <= 100:
        return f"; {value:g} % is {value / 100:g}"
    return ""


def _hint(location: Location, known: list[str], recipe: type[BaseModel]) -> str:
    """Say what an unknown key may be meant for."""
    last = str(location[-1])
    if len(location) > 1 and (kinds := _kinds_with(recipe, str(location[0]), last)):
        names = [name for kind in kinds for name in get_args(kind.model_fields["name"].annotation)]
        return f" for {location[1]}; {', '.join(names)} have it"
    owner = next((name for name in recipe.model_fields if _kinds_with(recipe, name, last)), None)
    if owner:  # a key without its section, or in a wrong one
        return f"; did you mean {owner}.{last}?"
    return did_you_mean(last, known)


def _how_to_change_kind(findings: list[ErrorDetails], recipe: type[BaseModel]) -> Iterator[str]:
    """Say how to change the kind of a section, for each key of another kind: its name was changed, and that was not."""
    for finding in findings:
        location = finding["loc"]
        if finding["type"] != "extra_forbidden" or len(location) == 1:
            continue
        section = _section(recipe, location)
        if section and _kinds_with(recipe, str(location[0]), str(location[-1])):
            fields = section.model_fields.items()
            needed = [f", {name}=…" for name, field in fields if field.is_required() and name != "name"]
            whole = f'{location[0]}={{name="{location[1]}"{"".join(needed)}}}'
            yield f"another kind needs the whole section: --set '{whole}'"


def _kinds_with(recipe: type[BaseModel], section: str, key: str) -> list[type[BaseModel]]:
    """Return the classes of a section that have a key."""
    kinds = [kind for kind in section_classes(recipe, section) if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, BaseModel) and key in kind.model_fields]


def _dotted(keys: Location) -> str:
    """Return a key's name as recipes write it, e.g. `data.mean[0]`."""
    name = ""
    for key in keys:
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else str(key)
    return name


def _section(recipe: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Return the class that the finding's setting belongs to."""
    if len(location) == 1:
        return recipe
    kinds = section_classes(recipe, location[0])
    if len(kinds) == 1:
        return kinds[0]
    return next((kind for kind in kinds if location[1] in get_args(kind.model_fields["name"].annotation)), None)


def section_classes(recipe: type[BaseModel], section: int | str) -> tuple[type[BaseModel], ...]:
    """Return the classes that a section may be: optimizers and schedules have several."""
    field = recipe.model_fields.get(str(section))
    annotation: Any = field.annotation if field else None
    kinds = get_args(annotation) or (annotation,)
    return tuple(get_args(kind)[0] if hasattr(kind, "__metadata__") else kind for kind in kinds)
