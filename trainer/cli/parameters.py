"""Arguments and options of the commands, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """List the built-in recipes whose names begin so, for the shell; where there is none, it completes a path."""
    from ..config import built_in

    return [name for name in built_in() if name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="Built-in recipe, or path of a .toml file.", autocompletion=complete_recipe),
]
DataFolder = Annotated[
    Path, typer.Option(metavar="DIR", help="Packed data set: the folder that holds train/ and val/.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="section.key=value", help="Change one setting, or with section={…} a section; repeatable."
    ),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto (GPUs where there are any), cpu or cuda.")]
Stage = Annotated[
    Path | None, typer.Option(metavar="LOCAL", help="First stage --data to this folder on each node's own disk.")
]
LocalFolder = Annotated[
    Path | None,
    typer.Option(metavar="LOCAL", help="Write checkpoints to a node's own disk first, and copy them meanwhile."),
]
RankTimeout = Annotated[
    float, typer.Option(metavar="S", help="End the run when a rank does nothing for so many seconds.")
]
StopSignals = Annotated[
    str, typer.Option(metavar="NAMES", help="Signals after which the run saves a checkpoint and stops.")
]
MaxTime = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Save a checkpoint and stop in time, e.g. 4:00:00 (default: the job's end)."),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(metavar="N", help="How often to continue by itself, also without failed nodes (default: 20)."),
]
