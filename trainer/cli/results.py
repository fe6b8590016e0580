"""The commands about what has been trained, and what there is to train. As in the rest, imports come late."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from datapipe.console import print_lines

from .parameters import Changes, DataFolder, Device, RecipeName, Stage, complete_recipe


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs; several are compared in one report.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write to (default: that of a single run).")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again and again, until all runs end.")] = False,
) -> None:
    """Write the report of a run, or one that compares several.

    It is report.html, with its plots as PDF and PNG beside it, and of a single run its MLPerf-compliant log.

    \b
    Example:
      trainer report runs/one-rank runs/two-ranks --out reports/ranks
    """
    from datapipe.errors import SettingError

    if out is None and len(runs) > 1:
        raise SettingError(f"--out is missing: a report on {len(runs)} runs needs a folder of its own")
    if watch:
        from ..reporting.watching import watch_report

        print_lines(watch_report(runs, out or runs[0]))
        return
    from ..reporting.page import write_report

    print_lines(write_report(runs, out or runs[0]))


def repeat(
    recipe: RecipeName,
    data: DataFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs: each goes to seed-K in it.")],
    seeds: Annotated[int, typer.Option(metavar="N", help="How many, from the recipe's own seed on.")] = 5,
    changes: Changes = None,
    device: Device = "auto",
    stage: Stage = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes of each training.")] = 1,
    launcher: Annotated[
        str, typer.Option(metavar="NAME", help="What starts them: torchrun (on this host), or srun in a Slurm job.")
    ] = "torchrun",
    index: Annotated[
        int | None,
        typer.Option(
            metavar="I",
            envvar="SLURM_ARRAY_TASK_ID",
            help="Train with this seed only, from 0; in an array job, its own.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what OUT/repeat.json holds.")] = False,
) -> None:
    """Train a recipe once per seed, and print each run, means and 95 % intervals.

    What has finished is not redone, all else is resumed. Exit code 0: all reached their target (or have none); 1: not
    all; otherwise as `trainer train`.

    \b
    Example:
      trainer repeat fashion-mnist-resnet8 --data data/fashion-mnist --out runs/resnet8 --seeds 5
    """
    from ..measuring.repeat import Repeats
    from ..measuring.repeat import repeat as train_repeats
    from ..measuring.tables import show_group

    plan = Repeats(recipe, data, out, seeds, tuple(changes or ()), device, stage, ranks, launcher)
    group, code = train_repeats(plan, index)
    print(show_group(group, as_json), flush=True)
    raise typer.Exit(code)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run, or of repeats.")],
    b: Annotated[Path | None, typer.Argument(metavar="[B]", help="Another; without it, A alone is shown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs, or repeats, B with A: ratios with 95 % intervals, and whether they can be told from noise.

    \b
    Example:
      trainer compare runs/sgd runs/kfac
    """
    from datapipe.errors import SettingError

    from ..measuring.runs import read_group
    from ..measuring.tables import show_group

    if b is None:
        print(show_group(read_group(a), as_json))
        return
    if a.resolve() == b.resolve():
        raise SettingError(f"A and B: both are {a}; without B, its runs are shown")
    from ..measuring.compare import show_comparison

    print(show_comparison(read_group(a), read_group(b), as_json))


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A recipe to print, as a file to begin with.", autocompletion=complete_recipe
        ),
    ] = None,
) -> None:
    """List the built-in recipes, and where their figures come from; or print one of them.

    \b
    Example:
      trainer recipes
      trainer recipes imagenet-resnet50 >my.toml
    """
    from ..config import built_in, find_recipe

    if name is not None:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    for name, path in built_in().items():
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = recipe["train"]
        target = f", target {settings['target_accuracy']:.1%}" if "target_accuracy" in settings else ""
        print(name)
        print(f"    {recipe['model']['name']}, {settings['epochs']} epochs, batch {settings['batch_size']}{target}")
        print(f"    {recipe['source']}")
