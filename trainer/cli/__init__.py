"""The `trainer` command. Imports torch only in the commands that train, so that --help answers at once."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from datapipe import __version__, console
from datapipe.cluster import name_rank

from .parameters import (
    Changes,
    DataFolder,
    Device,
    LocalFolder,
    MaxRestarts,
    MaxTime,
    RankTimeout,
    RecipeName,
    Stage,
    StopSignals,
)
from .results import compare, recipes, repeat, report

app = typer.Typer(
    help="Train a recipe on a packed data set until a target accuracy, and report the time it took.\n\n"
    "\b\nExample:\n  trainer train fashion-mnist-resnet8 --data data/fashion-mnist --out runs/first",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, in half the time
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"trainer {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: RecipeName,
    data: DataFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run, for metrics, checkpoint and report.")],
    changes: Changes = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --out from its checkpoint; without one, start it."),
    ] = False,
    device: Device = "auto",
    stage: Stage = None,
    rank_timeout: RankTimeout = 120,
    stop_signals: StopSignals = "TERM,INT,USR1,USR2",
    max_time: MaxTime = None,
    local_checkpoints: LocalFolder = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also log to csv, tensorboard, or what a package adds; repeatable."),
    ] = None,
) -> None:
    """Train a recipe until its target accuracy, or for all its epochs.

    Exit code 0: target reached (or none set); 1: target missed, or training failed; 2: wrong use; 75: the time was
    over; 128 + number: stopped by a signal (SIGTERM 143, Ctrl-C 130, SIGUSR1 138). After these a checkpoint is saved,
    from which --resume continues.

    Processes that a launcher started train together, and one that would train on its own in a job of several nodes is
    refused. Where that is meant: srun -N1 -n1, or RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500.

    \b
    Example:
      trainer train fashion-mnist-resnet8 --data data/fashion-mnist --out runs/first \\
          --set train.epochs=3 --set optimizer.lr=0.1
    On two GPUs:
      torchrun --nproc-per-node 2 -m trainer train imagenet-resnet50 \\
          --data data/imagenet --out runs/imagenet
    """
    now = time.time()
    from ..ranks.limits import find_end

    ends_at = find_end(os.environ, max_time, now)
    from ..config.recipe import load_recipe
    from ..ranks.connection import telling_others
    from ..run.run import RunOptions, run

    with telling_others(out):
        checked, signals = load_recipe(recipe, changes or []), stop_signals.split(",")
        options = RunOptions(resume, device, stage, rank_timeout, signals, ends_at, local_checkpoints, log or ())
        code = run(checked, data, out, options)
    raise typer.Exit(code)


@app.command()
def launch(
    recipe: RecipeName,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Packed data set, on a filesystem that all nodes share.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run, which the script is written to.")],
    scheduler: Annotated[str, typer.Option(metavar="NAME", help="slurm, pbs, mpi (mpirun), or local (this host).")],
    nodes: Annotated[int, typer.Option(metavar="N", help="How many nodes.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="G", help="As many ranks run on each; 0: one, on the processor.")
    ] = 0,
    stage: Stage = None,
    limit: Annotated[str | None, typer.Option("--time", metavar="TIME", help="Of a job, such as 4:00:00.")] = None,
    max_restarts: MaxRestarts = None,
    local_checkpoints: LocalFolder = None,
    changes: Changes = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Of sbatch or qsub, such as --option=--account=abc; repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a script that is there.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script, or run it where that is local.")] = False,
) -> None:
    """Write a batch script that stages a data set, trains a recipe, and continues after whatever stops it.

    It is RUN/launch.sbatch, launch.pbs or launch.sh: short, to be read and edited.

    \b
    Example:
      trainer launch imagenet-resnet50 --scheduler slurm --nodes 2 --gpus-per-node 4 --time 4:00:00 \\
          --data /shared/packed/imagenet --stage /local/imagenet --out runs/imagenet --submit
    """
    from ..launching import Launch

    plan = Launch(
        recipe=str(Path(recipe).absolute()) if recipe.endswith(".toml") else recipe,
        data=data.absolute(),
        out=out.absolute(),
        scheduler=scheduler,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        stage=stage and stage.absolute(),
        time=limit,
        max_restarts=max_restarts,
        changes=tuple(changes or ()),
        local_checkpoints=local_checkpoints and local_checkpoints.absolute(),
        options=tuple(option or ()),
        path=Path(sys.executable).parent,
    )
    console.print_lines(plan.write(overwrite))
    if submit:
        raise typer.Exit(plan.submit())


@app.command()
def profile(
    recipe: RecipeName,
    data: DataFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for trace.json.gz and profile.json.")],
    steps: Annotated[int, typer.Option(metavar="N", help="How many to time, and to trace.")] = 20,
    changes: Changes = None,
    device: Device = "auto",
    stage: Stage = None,
) -> None:
    """Train some steps of a recipe, and tell what bounds it, and what to change.

    On all ranks, as `trainer train`. The trace opens at ui.perfetto.dev, or in chrome://tracing.

    \b
    Example:
      trainer profile fashion-mnist-resnet8 --data data/fashion-mnist --out profiles/resnet8
    """
    from ..config.recipe import load_recipe
    from ..ranks.connection import telling_others
    from ..run.profile import profile as profile_steps

    with telling_others(out):
        text = profile_steps(load_recipe(recipe, changes or []), data, out, steps, device, stage)
    if text is not None:
        print(text, flush=True)


for _command in (report, repeat, compare, recipes):
    app.command()(_command)


def main() -> int:
    """Run the command line; return its exit code, which the installed script exits with."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs every glyph of a report's PDF
    try:
        code = console.run(app, *name_rank(os.environ))
    except BaseException as error:
        # A SystemExit comes from a SIGTERM that arrived while a message was being written.
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        _leave(code, error)
        raise
    _leave(code)
    return code


def _leave(code: int, error: BaseException | None = None) -> None:
    if "trainer.ranks.connection" in sys.modules:  # otherwise there is nothing to leave, and torch need not be loaded
        from ..ranks.connection import leave

        leave(code, error)


if __name__ == "__main__":
    raise SystemExit(main())
