"""The commands `datapipe bench` and `datapipe doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import print_lines
from ..names import BACKENDS, CROPS, IOS, ORDERS
from .parameters import AsJson, DataSetFolder, folder_named, one_of


def bench(
    folder: DataSetFolder,
    backend: Annotated[str, typer.Option(help="Backend of the loader.", **one_of(BACKENDS))] = "cpu",
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images per batch.")] = 256,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Epochs to measure.")] = 2,
    size: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Side of the output (default: the images', or 224).")
    ] = None,
    crop: Annotated[str, typer.Option(help="How images are cropped, as in a recipe.", **one_of(CROPS))] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="Decoding threads (default: one per core).")] = None,
    order: Annotated[
        str,
        typer.Option(help="full: uniform shuffle; blocks: large blocks, each read once.", **one_of(ORDERS)),
    ] = "full",
    io: Annotated[
        str, typer.Option(help="cached: page cache; mmap: memory-mapped; direct: O_DIRECT.", **one_of(IOS))
    ] = "cached",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Device of the batches, e.g. cuda.")] = "cpu",
    step_ms: Annotated[
        float, typer.Option(metavar="MS", min=0, help="Simulate an accelerator that takes MS per batch.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Measure a loader's images per second, and what limits it."""
    from ..bench import bench, format_result

    settings: dict[str, Any] = {"crop": crop, "order": order, "io": io, "device": device, "threads": threads}
    result = bench(folder, backend, batch_size, epochs, size, step_ms / 1000, **settings)
    print_lines(*([json.dumps(result)] if as_json else format_result(result)))


def doctor(
    folder: Annotated[Path, folder_named("DIR", "A packed data set, or a folder on the filesystem in question.")],
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Nodes that would stage (default: the job's, else 1).")
    ] = None,
    network_mbps: Annotated[
        float | None, typer.Option(metavar="MB/S", help="What a node receives from others (default: its link's speed).")
    ] = None,
    local: Annotated[
        Path | None, typer.Option(metavar="LOCAL", help="Folder on this node's own disk (default: that of $TMPDIR).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a filesystem and this node.

    Says what the loader's settings should be for a data set under DIR, and for a packed data set, how to stage it.
    """
    from ..cluster import num_nodes, placement
    from ..doctor import doctor, format_report

    count = num_nodes(os.environ) if nodes is None else nodes
    master = placement(os.environ).master if count > 1 and network_mbps is None else ""
    result = doctor(folder, local, count, network_mbps, master)
    print_lines(*([json.dumps(result)] if as_json else format_report(result)))
