"""Write the reference pages that are made from the code: `python docs/generate.py`.

`reference/cli.md` comes from the commands themselves, `reference/recipe.md` from the classes that check a recipe,
the others from the records of benchmarks. A test compares the committed pages with what this writes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ValidationError

from datapipe import cli as datapipe_cli
from trainer import cli as trainer_cli
from trainer.config.recipe import Recipe

FOLDER = Path(__file__).parent / "reference"
ROOT = Path(__file__).parents[1]
NOTE = "<!-- Written by docs/generate.py; change the code, not this page. -->"
Kind = type[BaseModel]

RECIPE_INTRODUCTION = (
    "A recipe is a TOML file. An unknown key, a value of another type or a value out of its range is an error that",
    'names the setting, its value and what is allowed. The word `"none"` stands for no value: TOML has no null. How to',
    "choose settings is described in [What fast recipes are made of](../explanation/recipes.md).",
    "[Built-in recipes](built-in-recipes.md) are examples.",
)
RECIPE_HEADER = ("| key | what it is | type | default |", "| --- | --- | --- | --- |")


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Return the text of each page, by its name in `reference/`."""
    sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
    from benchmarks.tables import write_tables

    tables = {f"{name}.md": "\n".join([NOTE, "", *lines, ""]) for name, lines in write_tables().items()}
    return {"cli.md": commands_page(), "recipe.md": recipe_page(), **tables}


# --- commands ---


@dataclass(frozen=True)
class Parameter:
    """An argument (no `flags`) or option of a command. `metavar`: what stands for its value; "" for a switch."""

    flags: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...]
    default: str


def commands_page() -> str:
    lines = [NOTE, "", "# Commands", ""]
    lines += ["Every command has `--help`. [Exit codes](troubleshooting.md#exit-codes) are the same for all.", ""]
    for program, app in (("datapipe", datapipe_cli.app), ("trainer", trainer_cli.app)):
        lines += [f"## {program}", "", _escaped(_paragraph(app.info.help)), ""]
        for command in app.registered_commands:
            lines += _command(program, command)
        for group in app.registered_groups:
            for command in group.typer_instance.registered_commands:
                lines += _command(f"{program} {group.name}", command)
    return "\n".join(lines).rstrip() + "\n"


def _command(program: str, command: typer.models.CommandInfo) -> Iterator[str]:
    name = f"{program} {command.name or command.callback.__name__}"
    parameters = [*_parameters(command.callback)]
    arguments = [parameter for parameter in parameters if not parameter.flags]
    options = [parameter for parameter in parameters if parameter.flags]
    usage = [name, *(argument.metavar for argument in arguments), *(["[options]"] if options else [])]
    text = inspect.getdoc(command.callback) or ""
    yield from (f"### {name}", "", _escaped(_paragraph(text)), "", "```text", " ".join(usage), "```", "")
    if arguments:
        yield from ("| argument | what it is |", "| --- | --- |")
        yield from (f"| `{argument.metavar}` | {_escaped(argument.help)} |" for argument in arguments)
        yield ""
    if options:
        yield from ("| option | what it does | default |", "| --- | --- | --- |")
        for option in options:
            value = f" {option.metavar}".rstrip().replace("|", "\\|")
            names = ", ".join(f"`{flag}{value}`" for flag in option.flags)
            choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
            yield f"| {names} | {_escaped(option.help)}{choices} | {option.default} |"
        yield ""
    examples = text.partition("\b\n")[2] or re.sub(r"^Example:\s*", "  ", command.epilog or "")
    lines = [line.removeprefix("  ") for line in examples.replace("\b", "").splitlines() if line.strip()]
    lines = [f"# {line}" if line[0].isupper() and line.endswith(":") else line for line in lines if line != "Example:"]
    yield from ("```bash", *lines, "```", "")


def _parameters(function: Callable[..., object]) -> Iterator[Parameter]:
    """Read the options and arguments of a command from its signature."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            continue
        kind, info = get_args(hints[name])[:2]
        is_many = any(get_origin(part) is list for part in (kind, *get_args(kind)))
        kinds = [part for part in (get_args(kind) or (kind,)) if part is not type(None)]
        choices = tuple(choice.value for choice in kinds[0]) if _is_enum(kinds[0]) else ()
        metavar = info.metavar or ""
        if metavar.startswith("<"):
            choices, metavar = tuple(metavar.strip("<>").split("|")), ""
        is_option = isinstance(info, typer.models.OptionInfo)
        # typer takes the first name for a default value until it reads the annotation.
        named = [flag for flag in (info.default, *(info.param_decls or ())) if str(flag).startswith("-")]
        flags = tuple(named or (f"--{name.replace('_', '-')}",)) if is_option else ()
        fallback = "" if kinds[0] is bool else name.upper().replace("_", "-") if is_option else name.upper()
        metavar = metavar or fallback
        yield Parameter(
            flags, f"{metavar}…" if is_many and not is_option else metavar, info.help or "", choices,
            _default(parameter.default),
        )  # fmt: skip


def _is_enum(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    value = value.value if isinstance(value, Enum) else value
    if value is None or value is False:
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\b")[0].split())


def _escaped(text: str) -> str:
    """Escape what Markdown, or a table in it, would take for its own."""
    return re.sub(r"([|<*_])", r"\\\1", text)


# --- the recipe ---


def recipe_page() -> str:
    lines = [NOTE, "", "# Recipe", "", *RECIPE_INTRODUCTION, "", *_table(Recipe, "", _scalars(Recipe))]
    for section, field in Recipe.model_fields.items():
        kinds = _kinds(field.annotation)
        if len(kinds) > 1:
            lines += [f"## {section}", "", *_union(section, kinds)]
        elif kinds:
            lines += [f"## {section}", "", *_text(kinds[0]), *_table(kinds[0], section, [*kinds[0].model_fields])]
    return "\n".join(lines).rstrip() + "\n"


def _union(section: str, kinds: list[Kind]) -> Iterator[str]:
    """Describe a section that is of one of several classes, told apart by `name`: what all have, then each."""
    first, *others = kinds
    common = [key for key in first.model_fields if all(_row(first, key) == _row(kind, key) for kind in others)]
    names = " or ".join(f"`{_tag(kind)}`" for kind in kinds)
    yield from RECIPE_HEADER
    yield f"| `{section}.name` | Which of those below. | {names} | {_recipe_default(first, 'name')} |"
    yield from list(_table(first, section, common))[2:]
    for kind in kinds:
        yield from (f"### {section}.name = {_tag(kind)}", "", *_text(kind))
        own = [key for key in kind.model_fields if key not in (*common, "name")]
        yield from _table(kind, section, own) if own else ()


def _text(kind: Kind) -> list[str]:
    text = " ".join((vars(kind).get("__doc__") or "").split())
    parts = text.split("`")
    return ["`".join([_escaped(part) if i % 2 == 0 else part for i, part in enumerate(parts)]), ""] if text else []


def _table(kind: Kind, section: str, keys: list[str]) -> Iterator[str]:
    yield from RECIPE_HEADER
    for key in keys:
        form, default = _row(kind, key)
        name = f"{section}.{key}" if section else key
        description = kind.model_fields[key].description
        if not description:
            raise ValueError(f"{kind.__name__}.{key} has no description: write it as a text under the field")
        default = "the file's name" if name == "name" else default
        text = " ".join(description.split()).replace("|", r"\|")
        yield f"| `{name}` | {text} | {form} | {default} |"
    yield ""


def _scalars(kind: Kind) -> list[str]:
    return [name for name, field in kind.model_fields.items() if not _kinds(field.annotation)]


def _row(kind: Kind, key: str) -> tuple[str, str] | None:
    """Return a setting's type and default, or None where the class has no such setting."""
    if key not in kind.model_fields:
        return None
    schema = kind.model_json_schema()
    form = _form(schema["properties"][key], schema.get("$defs", {}))
    names = _allowed(kind, key) if form == "string" else []
    return " or ".join(f'`"{choice}"`' for choice in names) or form, _recipe_default(kind, key)


def _recipe_default(kind: Kind, name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return "required"
    value = field.default
    pairs = isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], tuple)
    value = value[0][1] if pairs else value  # (epoch, value) from the beginning: the value
    if value is None:
        return '`"none"`'
    return f"`{json.dumps(value)}`" if value != "" else ""


def _form(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Say a type and its range, as JSON schema has them, in words."""
    if "$ref" in schema:
        return _form(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_form(part, definitions) for part in schema["anyOf"]))
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if "enum" in schema:
        return " or ".join(f'`"{choice}"`' for choice in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        inner = schema.get("items") or schema.get("prefixItems", [{}])
        if isinstance(inner, list):
            return f"{len(inner)} times {_form(inner[0], definitions)}"
        if "prefixItems" in inner:
            return f"{_form(inner['prefixItems'][1], definitions)}; or pairs of an epoch and such a value"
        low, high = schema.get("minItems"), schema.get("maxItems")
        count = f"{low} to {high}" if high else f"{low} or more" if low else "any number"
        return f"list of {count}: {_form(inner, definitions)}"
    word = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "null": '`"none"`'}
    return word.get(kind, "string") + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    parts = [f"{sign} {schema[key]:,.10g}" for key, sign in signs.items() if key in schema]
    return f" {', '.join(parts)}" if parts else ""


def _allowed(kind: Kind, name: str) -> list[str]:
    """Return the names that a string may be, if the recipe says so when it refuses another."""
    try:
        kind.model_validate({name: "no such name"})
    except ValidationError as error:
        refused = next((line["msg"] for line in error.errors() if line["loc"] == (name,)), "")
        return [word.strip() for word in refused.partition("allowed: ")[2].split(",") if word]
    return []


def _kinds(annotation: Any) -> list[Kind]:
    """Return the classes that a section may be of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts = get_args(annotation)
    return [kind for part in (parts[:1] if get_origin(annotation) is Annotated else parts) for kind in _kinds(part)]


def _tag(kind: Kind) -> str:
    return json.dumps(get_args(kind.model_fields["name"].annotation)[0])


if __name__ == "__main__":
    sys.exit(main())
