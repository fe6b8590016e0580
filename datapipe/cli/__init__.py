"""The `datapipe` command. What a command needs is imported when it runs: `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, console, watched
from ..checks import check_seconds
from ..cluster import name_task
from ..console import print_lines
from ..errors import SettingError
from ..public_data import DATASETS
from ..watched import TIMEOUT_S
from .cache import cache
from .measure import bench, doctor
from .pack import convert, pack
from .parameters import AsJson, DataSetFolder, Timeout, folder_named, name_as_typed, one_of
from .stage import StageCommand, stage

app = typer.Typer(
    help="Pack image data sets into large shards, check them, and bring them to node-local disk.",
    epilog="Example:  datapipe pack raw/imagenet packed/imagenet",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> int:
    """Run the command line; return its exit code."""
    code = console.run(_run, name_task(os.environ))
    if "datapipe.jobgroup.group" in sys.modules or (code and "torch.distributed" in sys.modules):
        # A thread may still wait for other nodes in torch, which aborts when the interpreter ends around it.
        if not code and (mpi := sys.modules.get("mpi4py.MPI")):
            mpi.Finalize()  # or mpirun takes it for a failure
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run() -> None:
    try:
        app()
    except SettingError as error:
        typed = SettingError(name_as_typed(str(error), app))
        for note in getattr(error, "__notes__", []):
            typed.add_note(note)
        raise typed from error


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"datapipe {__version__}")
        raise typer.Exit


@app.command(epilog="Example:  datapipe fetch fashion-mnist raw/fashion-mnist")
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DATASETS)}.", **one_of(DATASETS, "NAME"))],
    folder: Annotated[Path, folder_named("DIR", "Folder for its files.")],
) -> None:
    """Get a public data set's files, checked against their sha256 sums."""
    from ..fetch import fetch

    print_lines(*fetch(name, folder))


app.command(epilog="Example:  datapipe pack raw/imagenet packed/imagenet --resize short=256 --restart 8")(pack)
app.command(epilog="Example:  datapipe convert packed/imagenet packed/imagenet-hdf5 --format hdf5")(convert)


@app.command(epilog="Example:  datapipe info packed/imagenet --json")
def info(folder: DataSetFolder, as_json: AsJson = False) -> None:
    """Say what a packed data set holds."""
    from ..dataset.index import open_index
    from ..dataset.manifest import Manifest, find_data_sets
    from .summaries import format_details, format_summary, summarise

    def look() -> list[dict[str, Any]]:
        manifests = [(path, Manifest.read(path)) for path in find_data_sets(folder)]
        return [summarise(path, manifest, open_index(path, manifest)) for path, manifest in manifests]

    splits = watched.call(look, TIMEOUT_S, folder)
    if as_json:
        print(json.dumps(splits))
        return
    for row in splits:
        print_lines(format_summary(row), f"  {format_details(row)}")


@app.command(epilog="Example:  datapipe verify --deep /local/imagenet")
def verify(
    folders: Annotated[list[Path], folder_named("DIR", "Packed data sets, or folders of their splits.")],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, too.")] = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Check every file against its checksum.

    If one differs, each bad shard and key is named, and the exit code is 1.
    """
    from ..dataset.manifest import find_data_sets
    from ..dataset.verify import verify

    check_seconds("timeout_s", timeout)
    paths = [path for folder in folders for path in watched.call(partial(find_data_sets, folder), timeout, folder)]
    results = {str(path): verify(path, deep, timeout) for path in paths}  # all, then print
    if as_json:
        print(json.dumps({path: [vars(problem) for problem in problems] for path, problems in results.items()}))
    for path, problems in results.items():
        for line in () if as_json else problems or ("good",):
            print_lines(f"{path}: {line}")
    if any(results.values()):
        raise typer.Exit(1)


app.command(cls=StageCommand, epilog="Example:  datapipe stage /shared/packed/imagenet /local/imagenet --json")(stage)
app.add_typer(cache, name="cache")


app.command(epilog="Example:  datapipe bench /local/imagenet --backend cpu --epochs 2 --json")(bench)
app.command(epilog="Example:  datapipe doctor /shared/packed/imagenet --nodes 16")(doctor)
