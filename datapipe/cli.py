"""The `datapipe` command. What a command needs is imported when it runs: `--help` answers at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__, console
from .names import BACKENDS, CHECKS, COMPRESSIONS, FORMATS, IOS, KINDS, ORDERS, STORES
from .public_data import DATASETS

if TYPE_CHECKING:
    from .cluster import Task
    from .packing import PackResult

app = typer.Typer(
    help="Pack image data sets into large shards, check them, and bring them to node-local disk.",
    epilog="Example:  datapipe pack raw/imagenet packed/imagenet",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def one_of(names: Iterable[str], metavar: str = "") -> dict[str, Any]:
    """Describe a parameter that takes one of these names; without a `metavar`, `--help` shows them in its place."""
    choices = tuple(names)

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return {"parser": check, "metavar": metavar or f"<{'|'.join(choices)}>"}


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataSetFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A packed data set, or the folder of its splits.")]


def main() -> int:
    return console.run(app)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"datapipe {__version__}")
        raise typer.Exit


@app.command(epilog="Example:  datapipe fetch fashion-mnist raw/fashion-mnist")
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DATASETS)}.", **one_of(DATASETS, "NAME"))],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for its files.")],
) -> None:
    """Get a public data set's files, checked against their sha256 sums."""
    from .fetch import fetch

    for path in fetch(name, folder):
        print(path)


# What packing and converting share.
Out = Annotated[Path, typer.Argument(metavar="OUT", help="New folder, for one data set per split.")]
Format = Annotated[str, typer.Option("--format", help="Format of the shards.", **one_of(FORMATS))]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Files read at once, at most (default: 32).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT once the new data set is whole.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an unfinished pack in OUT; succeed if it is complete.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of a single read or write.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory for images, e.g. 8GiB (default: half of all).")
]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="I/N", help="Pack share I (from 0) of N (default: as Slurm, MPI or torchrun say)."),
]
Finish = Annotated[bool, typer.Option("--finish", help="Only write the manifests, once all tasks are done.")]


@app.command(epilog="Example:  datapipe pack raw/imagenet packed/imagenet --resize short=256 --restart 8")
def pack(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Folder, archives or CSV file: ImageFolder, ImageNet, CIFAR, …")
    ],
    out: Out,
    format: Format = "tar",
    kind: Annotated[str, typer.Option("--kind", help="What SOURCE is.", **one_of(["auto", *KINDS]))] = "auto",
    resize: Annotated[
        str | None, typer.Option("--resize", metavar="short=N|max=N", help="Make the shorter or longer side N pixels.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option("--quality", metavar="Q", help="Re-encode as JPEG of this quality (default: 90).")
    ] = None,
    restart: Annotated[
        int | None, typer.Option("--restart", metavar="N", help="Put a JPEG restart marker about every N MCUs.")
    ] = None,
    store: Annotated[
        str, typer.Option("--store", help="Store files as they are, or pixels.", **one_of(STORES))
    ] = "encoded",
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", help="With --store raw: scale and crop to N×N pixels.")
    ] = None,
    compress: Annotated[
        str | None, typer.Option("--compress", help="With --store raw: compress the pixels.", **one_of(COMPRESSIONS))
    ] = None,
    check: Annotated[
        str, typer.Option("--check", help="Read headers only, or decode every image.", **one_of(CHECKS))
    ] = "header",
    max_bad: Annotated[
        str, typer.Option("--max-bad", metavar="N|P%", help="Skip up to N (or P%) unreadable images; list them.")
    ] = "0",
    outside: Annotated[bool, typer.Option("--outside", help="Follow links and paths that lead out of SOURCE.")] = False,
    shard_mib: Annotated[int, typer.Option("--shard-mib", metavar="N", help="Target size of a shard in MiB.")] = 256,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the shuffle.")] = 0,
    workers: Workers = None,
    timeout: Timeout = 300.0,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Pack raw images into shards, shuffled once. Unless an option says otherwise, files are stored unchanged."""
    from . import packing
    from .cluster import detect
    from .images.recode import RecodeOptions

    recode = RecodeOptions(
        check=check,
        resize=resize,
        quality=quality,
        restart=restart,
        store=store,
        size=size,
        compress=compress,
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
        timeout_s=timeout,
        memory=memory,
        recode=recode,
        task=detect(os.environ, task),
    )
    started = time.perf_counter()
    manifests = (packing.finish if only_finish else packing.pack)(source, out, options)
    _print_packed(out, manifests, options.task, time.perf_counter() - started, as_json)


@app.command(epilog="Example:  datapipe convert packed/imagenet packed/imagenet-hdf5 --format hdf5")
def convert(
    folder: DataSetFolder,
    out: Out,
    format: Format,
    shard_mib: Annotated[
        int | None, typer.Option("--shard-mib", metavar="N", help="Target size of a shard in MiB (default: unchanged).")
    ] = None,
    workers: Workers = None,
    timeout: Timeout = 300.0,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Put a packed data set into another format: the same image bytes, keys, labels, order and quarantine."""
    from . import packing
    from .cluster import detect

    options = packing.PackOptions(
        format=format,
        shard_mib=shard_mib,
        workers=workers,
        overwrite=overwrite,
        resume=resume,
        timeout_s=timeout,
        task=detect(os.environ, task),
    )
    started = time.perf_counter()
    manifests = (packing.finish_conversion if only_finish else packing.convert)(folder, out, options)
    _print_packed(out, manifests, options.task, time.perf_counter() - started, as_json, is_recoded=False)


def _print_packed(
    out: Path, manifests: PackResult, task: Task, seconds: float, as_json: bool, is_recoded: bool = True
) -> None:
    from .summaries import format_images, format_summary, summarise

    splits = {split: summarise(out / split, manifest) for split, manifest in manifests.items()}
    if as_json:
        row = {"seconds": seconds, "missing_shards": manifests.num_missing, "splits": splits}
        print(json.dumps({"complete": bool(splits), **row}))
        return
    if not splits:
        print(f"task {task.index} of {task.count} is done; {manifests.num_missing} shards of other tasks are missing")
        return
    for split, row in splits.items():
        print(format_summary(row))
        for line in format_images(manifests[split], is_recoded):
            print(f"  {line}")
    images = sum(manifest.num_samples for manifest in manifests.values())
    print(f"{images:,} images in {seconds:.1f} s")


@app.command(epilog="Example:  datapipe info packed/imagenet --json")
def info(folder: DataSetFolder, as_json: AsJson = False) -> None:
    """Say what a packed data set holds."""
    from .dataset.index import open_index
    from .dataset.manifest import Manifest, find_data_sets
    from .summaries import format_summary, summarise

    splits = []
    for path in find_data_sets(folder):
        manifest = Manifest.read(path)
        splits.append(summarise(path, manifest, open_index(path, manifest)))
    if as_json:
        print(json.dumps(splits))
        return
    for row in splits:
        print(format_summary(row))
        print(f"  {row['format']}, {row['image_bytes_mean']:,.0f} bytes per image, {row['pixels']}, from {row['kind']}")


@app.command(epilog="Example:  datapipe verify --deep /local/imagenet")
def verify(
    folder: DataSetFolder,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, too.")] = False,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Check every file against its checksum; exit with 1 and name each bad shard and key if one differs."""
    from .dataset.manifest import find_data_sets
    from .dataset.verify import verify

    results = {str(path): verify(path, deep, timeout) for path in find_data_sets(folder)}  # all, then print
    if as_json:
        print(json.dumps({path: [vars(problem) for problem in problems] for path, problems in results.items()}))
    for path, problems in results.items():
        for line in () if as_json else problems or ("good",):
            print(f"{path}: {line}")
    if any(results.values()):
        raise typer.Exit(1)


@app.command(epilog="Example:  datapipe stage /shared/packed/imagenet $TMPDIR/imagenet")
def stage(
    folder: DataSetFolder,
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="Folder on this node's own disk.")],
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Copy a packed data set to local disk, verified. Run again, it continues, or finds everything in place."""
    from .staging import stage
    from .summaries import format_mib

    started = time.perf_counter()
    results = stage(folder, local, timeout)
    if as_json:
        rows = [{**vars(result), "folder": str(result.folder)} for result in results]
        print(json.dumps({"seconds": time.perf_counter() - started, "data_sets": rows}))
        return
    for result in results:
        copied, kept = format_mib(result.copied_bytes), format_mib(result.kept_bytes)
        print(f"{result.folder}: {result.num_samples:,} images, {copied} copied, {kept} there already")


@app.command(epilog="Example:  datapipe bench /local/imagenet --loader cpu --epochs 2 --json")
def bench(
    folder: DataSetFolder,
    loader: Annotated[str, typer.Option("--loader", help="Which backend.", **one_of(BACKENDS))] = "cpu",
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Images per batch.")] = 256,
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", min=1, help="Epochs to measure.")] = 2,
    size: Annotated[
        int | None, typer.Option("--size", metavar="PIXELS", help="Side of the output (default: the images', or 224).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Decoding threads (default: one per core).")
    ] = None,
    order: Annotated[
        str,
        typer.Option("--order", help="full: uniform shuffle; blocks: large blocks, each read once.", **one_of(ORDERS)),
    ] = "full",
    io: Annotated[
        str, typer.Option("--io", help="cached: page cache; mmap: memory-mapped; direct: O_DIRECT.", **one_of(IOS))
    ] = "cached",
    device: Annotated[str, typer.Option("--device", help="Device of the batches, e.g. cuda.")] = "cpu",
    step_ms: Annotated[
        float, typer.Option("--step-ms", metavar="MS", min=0, help="Simulate an accelerator that takes MS per batch.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Measure how many training images per second a loader delivers, and what limits it."""
    from .bench import bench, format_result

    settings = {"order": order, "io": io, "device": device, "threads": threads}
    result = bench(folder, loader, batch_size, epochs, size, step_ms / 1000, **settings)
    print(json.dumps(result) if as_json else "\n".join(format_result(result)))


@app.command(epilog="Example:  datapipe doctor /scratch/imagenet")
def doctor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder on the filesystem in question.")],
    as_json: AsJson = False,
) -> None:
    """Measure the filesystem under DIR and this node, and say how to set the loader."""
    from .doctor import describe, doctor

    result = doctor(folder)
    print(json.dumps(result) if as_json else "\n".join(describe(result)))
