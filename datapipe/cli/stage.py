"""The command `datapipe stage`."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ..names import STAGE_MODES
from ..streams import TIMEOUT_S
from .parameters import AsJson, DataSetFolder, Timeout, folder_named, one_of

logger = logging.getLogger(__name__)


def stage(
    folder: DataSetFolder,
    local: Annotated[Path, folder_named("LOCAL", "Folder on this node's own disk.")],
    mode: Annotated[
        str, typer.Option(help="copy: each node copies all; exchange: each reads a part.", **one_of(STAGE_MODES))
    ] = "auto",
    max_mbps: Annotated[
        float | None, typer.Option(metavar="MB/S", help="Read at most this much from DIR per node.")
    ] = None,
    streams: Annotated[int, typer.Option(metavar="N", help="Chunks copied at a time.")] = 4,
    chunk_mib: Annotated[int, typer.Option(metavar="N", help="Size of a chunk in MiB.")] = 8,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a copy of another data set in LOCAL.")] = False,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Process I (from 0) of N, one per node (default: as Slurm, MPI or torchrun say)."
        ),
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host of process 0 (default: as Slurm or torchrun say).")
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Network for exchange (default: the one that leads to process 0)."),
    ] = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Copy a packed data set to local disk, verified. Run again, it continues, or finds everything in place."""
    from ..cluster import lonely, placement
    from ..staging import StageOptions, stage
    from .summaries import format_staged

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of hosts that have no name
    place = placement(os.environ, node, master)
    options = StageOptions(
        mode=mode,
        max_mbps=max_mbps,
        streams=streams,
        chunk_mib=chunk_mib,
        replace=replace,
        timeout_s=timeout,
        placement=place,
        interface=interface,
    )
    if warning := lonely(os.environ, place):
        logger.warning(warning)
    if mode == "auto" and place.world_size > 1 and not place.master:
        logger.warning("each node copies all: the host of process 0 is not known; give --master HOST to exchange")
    started = time.perf_counter()
    results = stage(folder, local, options)
    if as_json:
        rows = [{**vars(result), "folder": str(result.folder)} for result in results]
        print(json.dumps({"seconds": time.perf_counter() - started, "data_sets": rows}))
        return
    for result in results:
        print(format_staged(result))
