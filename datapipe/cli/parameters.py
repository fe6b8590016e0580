"""The parameters that commands share, and how those are described that take a name or a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checks import did_you_mean


def one_of(names: Iterable[str], metavar: str = "") -> dict[str, Any]:
    """Describe a parameter that takes one of these names; without a `metavar`, `--help` shows them in its place."""
    choices = tuple(names)

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
        return value

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return {"parser": check, "metavar": metavar or f"<{'|'.join(choices)}>", "autocompletion": complete}


def folder_named(metavar: str, description: str) -> Any:
    """Describe a parameter that is a folder. One that may not be read is an error of the data, not of the usage."""
    return typer.Argument(metavar=metavar, help=description, parser=_parse_folder)


def _parse_folder(value: str) -> Path:
    """Return a path. An empty text, such as an unset variable of a script, is not taken for the current folder."""
    if not str(value):
        raise typer.BadParameter("is empty")
    return Path(value)


def name_as_typed(message: str, app: typer.Typer) -> str:
    """Put the option that was typed (`--shard-mib`) in place of the setting's name (`shard_mib`) that begins a message.

    Args:
        message: Message of a SettingError.
        app: The commands; a setting that is not an option of any keeps its name.
    """
    name, colon, rest = message.partition(":")
    commands = [*getattr(typer.main.get_command(app), "commands", {}).values()]
    commands += [below for command in commands for below in getattr(command, "commands", {}).values()]
    options = {param.name: param.opts[0] for command in commands for param in command.params}
    option = options.get(name.removesuffix("_s"), "")
    return f"{option}{colon}{rest}" if option.startswith("--") else message


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataSetFolder = Annotated[Path, folder_named("DIR", "A packed data set, or the folder of its splits.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of a single read or write.")]
