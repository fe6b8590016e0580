"""The parameters that commands share, and how those are described that take a name or a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checks import did_you_mean
from ..names import CONVERTED, FORMATS


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


MaxBad = Annotated[str, typer.Option(metavar="N|P%", help="Skip up to N (or P%) unreadable images; list them.")]
Split = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATTERN",
        help="Files, folders, values of a column or paths of split train or val, e.g. val='holdout-*.tar'; repeatable.",
    ),
]


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

# What packing and converting share.
Out = Annotated[Path, folder_named("OUT", "New folder, for one data set per split.")]
Format = Annotated[str, typer.Option(help="Format of the shards.", **one_of(FORMATS))]
NewFormat = Annotated[str, typer.Option("--format", help="Format of the shards.", **one_of(CONVERTED))]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Files read at once, at most (default: 32).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT once the new data set is whole.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Succeed if OUT is complete; what is unfinished is always continued.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Pack share I (from 0) of N (default: as Slurm, MPI or torchrun say)."),
]
Finish = Annotated[bool, typer.Option("--finish", help="Only write the manifests, once all tasks are done.")]
