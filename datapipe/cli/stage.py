"""The command `datapipe stage`."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from .. import watched
from ..console import print_lines
from ..errors import SettingError
from ..memory import parse_bytes
from ..names import STAGE_MODES, TRANSPORTS
from ..watched import TIMEOUT_S
from .parameters import AsJson, DataSetFolder, Timeout, folder_named, one_of

if TYPE_CHECKING:
    from ..staging import StageOptions
    from ..staging.progress import Background

logger = logging.getLogger(__name__)


# Options of earlier versions, by what does the same now.
MOVED = {
    "--list": "list CACHE",
    "--clean": "clean CACHE",
    "--free": "clean CACHE --free SIZE",
    "--pin": "pin LOCAL",
    "--unpin": "unpin LOCAL",
    "--status": "status LOCAL",
    "--wait": "wait LOCAL",
}


class StageCommand(typer.core.TyperCommand):
    """The command, which answers to options of earlier versions by what does the same now."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        for word in words:
            if now := MOVED.get(word.partition("=")[0]):
                raise SettingError(f"{word.partition('=')[0]}: is `datapipe cache {now}` now")
        return super().parse_args(context, words)


def stage(
    folder: DataSetFolder,
    local: Annotated[Path, folder_named("LOCAL", "Folder on this node's own disk.")],
    mode: Annotated[
        str,
        typer.Option(
            help="copy: each node copies all; exchange: each reads a part; slice: each has room for a part.",
            **one_of(STAGE_MODES),
        ),
    ] = "auto",
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With slice: what each node may hold, such as 500GiB.")
    ] = None,
    max_mbps: Annotated[
        float | None, typer.Option(metavar="MB/S", help="Read at most this much from DIR per node.")
    ] = None,
    streams: Annotated[
        int | None, typer.Option(metavar="N", help="Chunks copied at a time (default: 4; in the background 2).")
    ] = None,
    chunk_mib: Annotated[int, typer.Option(metavar="N", help="Size of a chunk in MiB.")] = 8,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the copy of another data set in LOCAL.")] = False,
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
    transport: Annotated[
        str, typer.Option(help="By what nodes exchange: gloo, or mpi (needs mpi4py, and mpirun).", **one_of(TRANSPORTS))
    ] = "gloo",
    timeout: Timeout = TIMEOUT_S,
    background: Annotated[
        bool, typer.Option("--background", help="Return when the first files are there; loaders use them meanwhile.")
    ] = False,
    evict: Annotated[
        bool, typer.Option("--evict", help="Make room: remove copies beside LOCAL, longest unused first.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a packed data set to local disk, verified. Run again, it continues, or finds everything in place."""
    from .. import staging
    from ..cluster import lonely, placement
    from .summaries import format_staged

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong is said by this software
    place = placement(os.environ, node, master)
    options = staging.StageOptions(
        mode=mode,
        capacity_bytes=parse_bytes("capacity", capacity) if capacity is not None else None,
        max_mbps=max_mbps,
        streams=streams,
        chunk_mib=chunk_mib,
        replace=replace,
        evict=evict,
        timeout_s=timeout,
        placement=place,
        interface=interface,
        transport=transport,
        in_background=background,
    )
    if warning := lonely(os.environ, place):
        logger.warning("%s; or give --node I/N", warning)
    if mode == "auto" and place.world_size > 1 and not place.master:
        logger.warning("each node copies all: the host of process 0 is not known; give --master HOST to exchange")
    if background and "SLURM_STEP_ID" in os.environ:
        logger.warning("srun ends a step's processes with its command: this one stays; put & behind srun's line")
    elif background and (process := _background(folder, local, options)):
        progress = process.wait_for_first()
        print_lines(json.dumps(progress.as_row()) if as_json else f"{local}: {progress}")
        return
    started = time.perf_counter()
    results = staging.stage(folder, local, options)
    if as_json:
        rows = [{**vars(result), "folder": str(result.folder)} for result in results]
        print(json.dumps({"seconds": time.perf_counter() - started, "data_sets": rows}))
        return
    print_lines(*map(format_staged, results))


def _background(folder: Path, local: Path, options: StageOptions) -> Background | None:
    """Do what `continue_in_background` does, unless it can be told now that nothing will be staged."""
    from ..staging.cache import make_first_room
    from ..staging.check import check
    from ..staging.copy import errors_name_the_node
    from ..staging.local_copy import list_copies
    from ..staging.progress import continue_in_background

    with errors_name_the_node():
        if options.resolved_mode() != "exchange":  # else all nodes are told
            check(folder, local, watched.call(lambda: list_copies(folder, local), options.timeout_s, folder), options)
        make_first_room({folder, local}, local, options)
    return continue_in_background(local)
