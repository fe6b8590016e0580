"""The `datapipe` command. What a command needs is imported when it runs: `--help` answers at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__, console
from .names import BACKENDS, CHECKS, COMPRESSIONS, FORMATS, IOS, KINDS, ORDERS, STORES
from .public_data import DATASETS

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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where its files are put.")],
) -> None:
    """Get a public data set's files, checked against their sha256 sums."""
    from .fetch import fetch

    for path in fetch(name, folder):
        print(path)


# What packing and converting share.
Out = Annotated[Path, typer.Argument(metavar="OUT", help="New folder: one data set a split is put in it.")]
Format = Annotated[str, typer.Option("--format", help="Format of the shards.", **one_of(FORMATS))]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Files read at once, where that helps (default: 32).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT once the new is whole (room for both).")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what is in OUT, and be content if it is complete.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="A read or write that takes longer is an error.")
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="For images: such as 8GiB (default: half of all).")]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="I/N", help="Write part I (from 0) of N (default: as Slurm, MPI or torchrun say)."),
]
Finish = Annotated[bool, typer.Option("--finish", help="Only write the manifests: all tasks are done.")]


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
        int | None, typer.Option("--quality", metavar="Q", help="JPEG quality of what is re-encoded (default: 90).")
    ] = None,
    restart: Annotated[
        int | None, typer.Option("--restart", metavar="N", help="JPEG restart markers about every N MCUs.")
    ] = None,
    store: Annotated[
        str, typer.Option("--store", help="Store files as they are, or pixels.", **one_of(STORES))
    ] = "encoded",
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", help="With raw: scale and cut pixels to N×N.")
    ] = None,
    compress: Annotated[
        str | None, typer.Option("--compress", help="With raw: compress the pixels.", **one_of(COMPRESSIONS))
    ] = None,
    check: Annotated[
        str, typer.Option("--check", help="Read headers only, or decode every image.", **one_of(CHECKS))
    ] = "header",
    max_bad: Annotated[
        str, typer.Option("--max-bad", metavar="N|P%", help="So many bad images are left out and listed.")
    ] = "0",
    outside: Annotated[bool, typer.Option("--outside", help="Follow links and paths that lead out of SOURCE.")] = False,
    shard_mib: Annotated[int, typer.Option("--shard-mib", metavar="N", help="Aimed size of a shard in MiB.")] = 256,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the order in the shards.")] = 0,
    workers: Workers = None,
    timeout: Timeout = 300.0,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Pack raw images into shards, shuffled once. Without options that say otherwise, files go in untouched."""
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
    _tell_packed(out, manifests, options.task, time.perf_counter() - started, as_json)


@app.command(epilog="Example:  datapipe convert packed/imagenet packed/imagenet-hdf5 --format hdf5")
def convert(
    folder: DataSetFolder,
    out: Out,
    format: Format,
    shard_mib: Annotated[
        int | None, typer.Option("--shard-mib", metavar="N", help="Aimed size of a shard in MiB (default: as it was).")
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
    _tell_packed(out, manifests, options.task, time.perf_counter() - started, as_json, is_recoded=False)


def _tell_packed(out: Path, manifests, task, seconds: float, as_json: bool, is_recoded: bool = True) -> None:
    splits = {split: _summary(out / split, manifest) for split, manifest in manifests.items()}
    if as_json:
        row = {"seconds": seconds, "missing_shards": manifests.num_missing, "splits": splits}
        print(json.dumps({"complete": bool(splits), **row}))
        return
    if not splits:
        print(f"task {task.index} of {task.count} is done; {manifests.num_missing} shards of other tasks are missing")
        return
    for split, row in splits.items():
        print(_line(row))
        for line in _conversions(manifests[split], is_recoded):
            print(f"  {line}")
    images = sum(manifest.num_samples for manifest in manifests.values())
    print(f"{images:,} images in {seconds:.1f} s")


def _conversions(manifest, is_recoded: bool) -> Iterator[str]:
    """Say what became of the images. `convert` keeps their bytes: the manifest's options are of the pack before."""
    if is_recoded and manifest.recode and manifest.source_bytes:
        stored = manifest.image_bytes / manifest.source_bytes
        yield f"images had {_mib(manifest.source_bytes)}, have {_mib(manifest.image_bytes)} ({stored:.1%})"
    if manifest.converted:
        yield "of another kind, converted: " + ", ".join(f"{n:,} {kind}" for kind, n in manifest.converted.items())
    if manifest.num_bad:
        yield f"{manifest.num_bad:,} bad images left out, see quarantine.jsonl"


@app.command(epilog="Example:  datapipe info packed/imagenet --json")
def info(folder: DataSetFolder, as_json: AsJson = False) -> None:
    """Say what a packed data set holds."""
    from .dataset.index import open_index
    from .dataset.manifest import Manifest, find_data_sets

    splits = []
    for path in find_data_sets(folder):
        manifest = Manifest.read(path)
        index = open_index(path, manifest)
        splits.append(_summary(path, manifest, index))
    if as_json:
        print(json.dumps(splits))
        return
    for line in splits:
        print(_line(line))
        mean = line["image_bytes_mean"]
        print(f"  {line['format']}, {mean:,.0f} bytes an image, {line['pixels']}, from {line['kind']}")


@app.command(epilog="Example:  datapipe verify --deep /local/imagenet")
def verify(
    folder: DataSetFolder,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image as well.")] = False,
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
    """Copy a packed data set to local disk, verified. Called again it continues, or finds all in place."""
    from .staging import stage

    started = time.perf_counter()
    results = stage(folder, local, timeout)
    if as_json:
        rows = [{**vars(result), "folder": str(result.folder)} for result in results]
        print(json.dumps({"seconds": time.perf_counter() - started, "data_sets": rows}))
        return
    for result in results:
        print(f"{result.folder}: {result.num_samples:,} images, "
              f"{_mib(result.copied_bytes)} copied, {_mib(result.kept_bytes)} there already")  # fmt: skip


@app.command(epilog="Example:  datapipe bench /local/imagenet --loader cpu --epochs 2 --json")
def bench(
    folder: DataSetFolder,
    loader: Annotated[str, typer.Option("--loader", help="Which backend.", **one_of(BACKENDS))] = "cpu",
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Images a batch.")] = 256,
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", min=1, help="How often to go through the data.")] = 2,
    size: Annotated[
        int | None, typer.Option("--size", metavar="PIXELS", help="Of a side (default: the images' own, or 224).")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Default: the cores.")] = None,
    order: Annotated[
        str, typer.Option("--order", help="Uniform, or large blocks each read once.", **one_of(ORDERS))
    ] = "full",
    io: Annotated[
        str, typer.Option("--io", help="Through the page cache, mapped, or past it.", **one_of(IOS))
    ] = "cached",
    device: Annotated[str, typer.Option("--device", help="Where batches are delivered, such as cuda.")] = "cpu",
    step_ms: Annotated[
        float, typer.Option("--step-ms", metavar="MS", min=0, help="An accelerator's time for a batch, emulated.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Measure how many training images a second a loader delivers, and what limits it."""
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


def _summary(path: Path, manifest, index=None) -> dict:
    """What `info` and `pack` say of a data set."""
    same = manifest.width is not None and manifest.height is not None
    colour = "grey" if manifest.channels == 1 else "RGB"
    row = {
        "path": str(path),
        "split": manifest.split,
        "format": manifest.format,
        "kind": manifest.kind,
        "num_samples": manifest.num_samples,
        "num_classes": manifest.num_classes,
        "num_shards": len(manifest.shards),
        "size_bytes": manifest.size_bytes,
        "num_bad": manifest.num_bad,
        "recode": manifest.recode,
        "converted": manifest.converted,
        "source_bytes": manifest.source_bytes,
        "image_bytes": manifest.image_bytes,
        "pixels": f"{manifest.width}×{manifest.height} {colour}" if same else f"{colour} of differing sizes",
    }
    if index is not None:
        row["image_bytes_mean"] = float(index["size"].mean())
        row["classes"] = manifest.classes
    return row


def _line(row: dict) -> str:
    return (
        f"{row['path']}: {row['num_samples']:,} images of {row['num_classes']} classes "
        f"in {row['num_shards']} shards, {_mib(row['size_bytes'])}"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
