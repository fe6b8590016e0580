"""The commands `datapipe pack` and `datapipe convert`.

Their parameters have the names of the settings; those that are not given keep the settings' defaults.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..console import format_count, print_lines, printable
from ..names import CHECKS, COMPRESSIONS, CONVERTED, FORMATS, KINDS, LABELS, STORES
from ..watched import TIMEOUT_S
from .parameters import AsJson, DataSetFolder, Timeout, folder_named, one_of

if TYPE_CHECKING:
    from ..cluster import Task
    from ..packing import PackOptions, PackResult

logger = logging.getLogger(__name__)

SourcePath = Annotated[Path, folder_named("SOURCE", "Folder, archives or CSV file: ImageFolder, ImageNet, CIFAR, …")]
Out = Annotated[Path, folder_named("OUT", "New folder, for one data set per split.")]
Format = Annotated[str, Option(help="Format of the shards.", **one_of(FORMATS))]
NewFormat = Annotated[str, Option("--format", help="Format of the shards.", **one_of(CONVERTED))]
Kind = Annotated[str, Option(help="Layout of SOURCE.", **one_of(["auto", *KINDS]))]
Resize = Annotated[str | None, Option(metavar="short=N|max=N", help="Make the shorter or longer side N pixels.")]
Quality = Annotated[
    int | None, Option(metavar="Q", help="Re-encode all as JPEG of this quality; else only what must be, at 90.")
]
RestartInterval = Annotated[int | None, Option(metavar="N", help="Put a JPEG restart marker about every N MCUs.")]
Store = Annotated[str, Option(help="Store files as they are, or pixels.", **one_of(STORES))]
Size = Annotated[int | None, Option(metavar="N", help="With --store raw: scale and crop to N×N pixels.")]
Compress = Annotated[str | None, Option(help="With --store raw: compress the pixels.", **one_of(COMPRESSIONS))]
Check = Annotated[str, Option(help="Read headers only, or decode every image.", **one_of(CHECKS))]
MaxBad = Annotated[str, Option(metavar="N|P%", help="Skip up to N (or P%) unreadable images; list them.")]
Outside = Annotated[bool, Option("--outside", help="Follow links and paths that lead out of SOURCE.")]
Split = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=PATTERN",
        help="Files, folders, values of a column or paths of split train or val, e.g. val='holdout-*.tar'; repeatable.",
    ),
]
Labels = Annotated[str, Option(help="Numbers of classes, or names to be numbered.", **one_of(LABELS))]
LabelColumn = Annotated[
    str | None, Option(metavar="NAME", help="Column of a table's labels (default: as it is usually called).")
]
PathColumn = Annotated[
    str | None, Option(metavar="NAME", help="Column of a CSV table's paths (default: as it is usually called).")
]
Strict = Annotated[bool, Option("--strict", help="Refuse to leave anything in SOURCE out.")]
LeftOutFile = Annotated[
    Path | None, Option(metavar="FILE", help="List what is left out of SOURCE in FILE, as lines of JSON.")
]
Channels = Annotated[
    int | None, Option(metavar="1|3", help="Read all as grey (1) or RGB (3), in all splits (default: grey if all are).")
]
ShardMib = Annotated[int, Option(metavar="N", help="Size of a shard to aim at, in MiB.")]
NewShardMib = Annotated[int | None, Option(metavar="N", help="Size of a shard to aim at, in MiB (default: unchanged).")]
Seed = Annotated[int, Option(metavar="N", help="Seed of the shuffle.")]
Workers = Annotated[int | None, Option(metavar="N", help="Files read at once, at most (default: 32).")]
Memory = Annotated[str | None, Option(metavar="SIZE", help="Memory for images, e.g. 8GiB (default: half of all).")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace OUT once the new data set is whole.")]
Resume = Annotated[bool, Option("--resume", help="Succeed if OUT is complete; what is unfinished is always continued.")]
TaskOption = Annotated[
    str | None, Option(metavar="I/N", help="Pack share I (from 0) of N (default: as Slurm, MPI or torchrun say).")
]
Finish = Annotated[bool, Option("--finish", help="Only write the manifests, once all tasks are done.")]


def pack(
    context: typer.Context,
    source: SourcePath,
    out: Out,
    format: Format = "tar",
    kind: Kind = "auto",
    resize: Resize = None,
    quality: Quality = None,
    restart: RestartInterval = None,
    store: Store = "encoded",
    size: Size = None,
    compress: Compress = None,
    check: Check = "header",
    max_bad: MaxBad = "0",
    outside: Outside = False,
    split: Split = None,
    labels: Labels = "auto",
    label_column: LabelColumn = None,
    path_column: PathColumn = None,
    strict: Strict = False,
    left_out: LeftOutFile = None,
    channels: Channels = None,
    shard_mib: ShardMib = 256,
    seed: Seed = 0,
    workers: Workers = None,
    timeout: Timeout = TIMEOUT_S,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    task: TaskOption = None,
    only_finish: Finish = False,
    as_json: AsJson = False,
) -> None:
    """Pack raw images into shards, shuffled once. Unless an option says otherwise, files are stored unchanged."""
    from .. import packing

    options = _options(context.params)
    _run(packing.finish if only_finish else packing.pack, source, out, options, as_json)


def convert(
    context: typer.Context,
    folder: DataSetFolder,
    out: Out,
    format: NewFormat,
    shard_mib: NewShardMib = None,
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

    options = _options(context.params)
    work = packing.finish_conversion if only_finish else packing.convert
    _run(work, folder, out, options, as_json)


def _options(typed: dict[str, Any]) -> PackOptions:
    """Make the settings of a command's parameters."""
    from ..cluster import detect
    from ..images.recode import RecodeOptions
    from ..packing import PackOptions

    given = {name: value for name, value in typed.items() if value is not None}
    given |= {"timeout_s": typed["timeout"], "task": detect(os.environ, typed["task"])}
    names = {field.name for field in dataclasses.fields(RecodeOptions)}
    given["recode"] = RecodeOptions(**{name: given[name] for name in names & given.keys()})
    names = {field.name for field in dataclasses.fields(PackOptions)}
    return PackOptions(**{name: given[name] for name in names & given.keys()})


def _run(
    work: Callable[[Path, Path, PackOptions], PackResult], source: Path, out: Path, options: PackOptions, as_json: bool
) -> None:
    """Call a function of `packing`, and print what is in OUT then; with `as_json`, as one line of JSON."""
    from ..dataset.manifest import STATE
    from .summaries import format_packed, summarise

    started = time.perf_counter()
    if options.task.count > 1:
        logger.info("%s: this is %s", out, _name_share(options.task))
    try:
        manifests = work(source, out, options)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        if (out / STATE).exists() and not options.overwrite:
            print(printable(f"{out} is unfinished; the same command continues"), file=sys.stderr)
        raise
    seconds = time.perf_counter() - started
    if as_json:
        splits = {split: summarise(out / split, manifest) for split, manifest in manifests.items()}
        row = {"seconds": seconds, "missing_shards": manifests.num_missing, "splits": splits}
        print(json.dumps({"complete": bool(splits), **row}))
    elif manifests:
        print_lines(*format_packed(out, manifests, seconds))
    else:
        done = f"{_name_share(options.task)} is done"
        print(f"{done}; other tasks have {format_count(manifests.num_missing, 'shard')} to write")


def _name_share(task: Task) -> str:
    """Say which share of a pack a process has, who says so, and how to have all."""
    share = f"task {task.index} of {task.count}"
    if task.launcher.startswith("--"):
        return share
    return f"{share} (as set by {task.launcher}; --task 0/1 packs everything here)"
