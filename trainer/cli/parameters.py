"""Options of several commands."""

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
Stage = Annotated[
    Path | None, typer.Option(metavar="LOCAL", help="First stage --data to this folder on each node's own disk.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Change one setting of the recipe; repeatable."),
]
