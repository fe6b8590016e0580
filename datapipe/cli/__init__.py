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
from ..names import CHECKS, COMPRESSIONS, KINDS, LABELS, STORES
from ..public_data import DATASETS
from ..watched import TIMEOUT_S
from .cache import cache
from .measure import bench, doctor
from .parameters import (
    AsJson,
    DataSetFolder,
    Finish,
    Format,
    MaxBad,
    NewFormat,
    Out,
    Overwrite,
    Resume,
    Split,
    TaskOption,
    Timeout,
    Workers,
    folder_named,
    name_as_typed,
    one_of,
)
from .running import pack_and_print
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


@app.command(epilog="Example:  datapipe pack raw/imagenet packed/imagenet --resize short=256 --restart 8")
def pack(
    source: Annotated[Path, folder_named("SOURCE", "Folder, archives or CSV file: ImageFolder, ImageNet, CIFAR, …")],
    out: Out,
    format: Format = "tar",
    kind: Annotated[str, typer.Option(help="Layout of SOURCE.", **one_of(["auto", *KINDS]))] = "auto",
    resize: Annotated[
        str | None, typer.Option(metavar="short=N|max=N", help="Make the shorter or longer side N pixels.")
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(metavar="Q", help="Re-encode all as JPEG of this quality; else only what must be, at 90."),
    ] = None,
    restart: Annotated[
        int | None, typer.Option(metavar="N", help="Put a JPEG restart marker about every N MCUs.")
    ] = None,
    store: Annotated[str, typer.Option(help="Store files as they are, or pixels.", **one_of(STORES))] = "encoded",
    size: Annotated[
        int | None, typer.Option(metavar="N", help="With --store raw: scale and crop to N×N pixels.")
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="With --store raw: compress the pixels.", **one_of(COMPRESSIONS))
    ] = None,
    check: Annotated[str, typer.Option(help="Read headers only, or decode every image.", **one_of(CHECKS))] = "header",
    max_bad: MaxBad = "0",
    outside: Annotated[bool, typer.Option("--outside", help="Follow links and paths that lead out of SOURCE.")] = False,
    split: Split = None,
    labels: Annotated[
        str, typer.Option(help="Numbers of classes, or names to be numbered.", **one_of(LABELS))
    ] = "auto",
    label_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of a table's labels (default: as it is usually called).")
    ] = None,
    path_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of a CSV table's paths (default: as it is usually called)."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse to leave anything in SOURCE out.")] = False,
    left_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="List what is left out of SOURCE in FILE, as lines of JSON.")
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(metavar="1|3", help="Read all as grey (1) or RGB (3), in all splits (default: grey if all are)."),
    ] = None,
    shard_mib: Annotated[int, typer.Option(metavar="N", help="Size of a shard to aim at, in MiB.")] = 256,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the shuffle.")] = 0,
    workers: Workers = None,
    timeout: Timeout = TIMEOUT_S,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for images, e.g. 8GiB (default: half of all).")
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Pack raw images into shards, shuffled once. Unless an option says otherwise, files are stored unchanged."""
    from .. import packing
    from ..cluster import detect
    from ..images.recode import RecodeOptions

    recode = RecodeOptions(
        check=check,
        resize=resize,
        quality=quality,
        restart=restart,
        store=store,
        size=size,
        compress=compress,
        channels=channels,
    )
    options = packing.PackOptions(
        format=format,
        kind=kind,
        shard_mib=shard_mib,
        workers=workers,
        seed=seed,
        overwrite=overwrite,
        resume=resume,
        max_bad=max_bad,
        outside=outside,
        split=split or (),
        labels=labels,
        label_column=label_column,
        path_column=path_column,
        strict=strict,
        left_out=left_out,
        timeout_s=timeout,
        memory=memory,
        recode=recode,
        task=detect(os.environ, task),
    )
    pack_and_print(packing.finish if only_finish else packing.pack, source, out, options, as_json)


@app.command(epilog="Example:  datapipe convert packed/imagenet packed/imagenet-hdf5 --format hdf5")
def convert(
    folder: DataSetFolder,
    out: Out,
    format: NewFormat,
    shard_mib: Annotated[
        int | None, typer.Option(metavar="N", help="Size of a shard to aim at, in MiB (default: unchanged).")
    ] = None,
    workers: Workers = None,
    timeout: Timeout = TIMEOUT_S,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Put a packed data set into another format.

    The image bytes, keys, labels, order and quarantine stay the same.
    """
    from .. import packing
    from ..cluster import detect

    options = packing.PackOptions(
        format=format,
        shard_mib=shard_mib,
        workers=workers,
        overwrite=overwrite,
        resume=resume,
        timeout_s=timeout,
        task=detect(os.environ, task),
    )
    convert = packing.finish_conversion if only_finish else packing.convert
    pack_and_print(convert, folder, out, options, as_json, is_recoded=False)


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
