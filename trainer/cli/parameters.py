"""Options of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Stage = Annotated[
    Path | None, typer.Option(metavar="LOCAL", help="First stage --data to this folder on each node's own disk.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Change one setting of the recipe; repeatable."),
]
