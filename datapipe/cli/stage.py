"""The command `datapipe stage`."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from ..console import print_lines
from ..errors import SettingError, StagingError
from ..foreign import open_own
from ..fsio import OWN_MODE, PRIVATE_MODE, make_folder
from ..memory import parse_bytes
from ..names import STAGE_MODES, TRANSPORTS
from ..watched import TIMEOUT_S
from .parameters import AsJson, DataSetFolder, Timeout, folder_named, one_of

if TYPE_CHECKING:
    from ..staging import StageOptions

logger = logging.getLogger(__name__)


# Options of earlier versions, by what does the same now.
_MOVED = {
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
            if now := _MOVED.get(word.partition("=")[0]):
                raise SettingError(f"{word.partition('=')[0]}: is `datapipe cache {now}` now")
        return super().parse_args(context, words)


_Local = Annotated[Path, folder_named("LOCAL", "Folder on this node's own disk.")]
_Mode = Annotated[
    str,
    typer.Option(
        help="copy: each node copies all; exchange: each reads a part; slice: each has room for a part.",
        **one_of(STAGE_MODES),
    ),
]
_Capacity = Annotated[
    str | None, typer.Option(metavar="SIZE", help="With slice: what each node may hold, such as 500GiB.")
]
_MaxMbps = Annotated[float | None, typer.Option(metavar="MB/S", help="Read at most this much from DIR per node.")]
_Streams = Annotated[
    int | None, typer.Option(metavar="N", help="Chunks copied at a time (default: 4; in the background 2).")
]
_ChunkMib = Annotated[int, typer.Option(metavar="N", help="Size of a chunk in MiB.")]
_Replace = Annotated[bool, typer.Option("--replace", help="Replace the copy of another data set in LOCAL.")]
_Node = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Process I (from 0) of N, one per node (default: as Slurm, MPI or torchrun say)."),
]
_Master = Annotated[
    str | None, typer.Option(metavar="HOST", help="Host of process 0 (default: as Slurm or torchrun say).")
]
_Interface = Annotated[
    str | None, typer.Option(metavar="NAME", help="Network for exchange (default: the one that leads to process 0).")
]
_Transport = Annotated[
    str, typer.Option(help="By what nodes exchange: gloo, or mpi (needs mpi4py, and mpirun).", **one_of(TRANSPORTS))
]
_InBackground = Annotated[
    bool, typer.Option("--background", help="Return when the first files are there; loaders use them meanwhile.")
]
_Evict = Annotated[bool, typer.Option("--evict", help="Make room: remove copies beside LOCAL, longest unused first.")]


def stage(
    folder: DataSetFolder,
    local: _Local,
    mode: _Mode = "auto",
    capacity: _Capacity = None,
    max_mbps: _MaxMbps = None,
    streams: _Streams = None,
    chunk_mib: _ChunkMib = 8,
    replace: _Replace = False,
    node: _Node = None,
    master: _Master = None,
    interface: _Interface = None,
    transport: _Transport = "gloo",
    timeout: Timeout = TIMEOUT_S,
    background: _InBackground = False,
    evict: _Evict = False,
    as_json: AsJson = False,
) -> None:
    """Copy a packed data set to local disk, verified. Run again, it continues, or finds everything in place."""
    from .. import staging
    from ..cluster import placement

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong is said by this software
    options = staging.StageOptions(
        mode=mode,
        capacity_bytes=parse_bytes("capacity", capacity) if capacity is not None else None,
        max_mbps=max_mbps,
        streams=streams,
        chunk_mib=chunk_mib,
        replace=replace,
        evict=evict,
        timeout_s=timeout,
        placement=placement(os.environ, node, master),
        interface=interface,
        transport=transport,
        in_background=background,
    )
    _warn(options)
    if not (background and _stage_apart(folder, local, options, as_json)):
        _stage_here(folder, local, options, as_json)


def _warn(options: StageOptions) -> None:
    from ..cluster import lonely

    place = options.placement
    if warning := lonely(os.environ, place):
        logger.warning("%s; or give --node I/N", warning)
    if options.mode == "auto" and place.world_size > 1 and not place.master:
        logger.warning("each node copies all: the host of process 0 is not known; give --master HOST to exchange")


def _stage_here(folder: Path, local: Path, options: StageOptions, as_json: bool) -> None:
    from .. import staging
    from .summaries import format_staged

    started = time.perf_counter()
    results = staging.stage(folder, local, options)
    if as_json:
        rows = [{**vars(result), "folder": str(result.folder)} for result in results]
        print(json.dumps({"seconds": time.perf_counter() - started, "data_sets": rows}))
        return
    print_lines(*map(format_staged, results))


def _stage_apart(folder: Path, local: Path, options: StageOptions, as_json: bool) -> bool:
    """Stage in a process apart from this one's terminal, unless it can be told now that nothing will be staged.

    Returns:
        To this process, when the other one has brought something, True; to that one, or if there can be none, False: it
        is to stage.
    """
    from ..staging.check import check, make_first_room
    from ..staging.copy import errors_name_the_node
    from ..staging.options import Request
    from ..staging.progress import look, wait_for_first

    if "SLURM_STEP_ID" in os.environ:
        logger.warning("srun ends a step's processes with its command: this one stays; put & behind srun's line")
        return False
    request = Request(folder, local, (), options)
    with errors_name_the_node():
        if options.resolved_mode() != "exchange":  # else all nodes are told
            check(Request.read(folder, local, options))
        make_first_room(request)
    before = look(local)
    if (log := _open_log(local)) is None:
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _leave_terminal(log)
        return False
    os.close(log)
    progress = wait_for_first(local, child, before.landed_bytes if before else 0)
    print_lines(json.dumps(vars(progress)) if as_json else f"{local}: {progress}")
    return True


def _open_log(local: Path) -> int | None:
    """Open the file for what a process in the background says, `.stage.log`; None if it cannot be written."""
    from ..staging.folder_content import LOG

    try:
        make_folder(local.parent, PRIVATE_MODE)
        make_folder(local, OWN_MODE)
        return open_own(local / LOG, os.O_APPEND)
    except (OSError, StagingError) as error:
        if not isinstance(error, StagingError) and error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        logger.warning("%s cannot be written (%s): staging in the foreground", local / LOG, error)
        return None


def _leave_terminal(log: int) -> None:
    """Continue apart from a terminal, and say everything in a log."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The log is emptied, unless another process still writes to it. Where files cannot be locked, it only grows.
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with suppress(OSError):
            fcntl.flock(log, kind | fcntl.LOCK_NB)
            if kind == fcntl.LOCK_EX:
                os.ftruncate(log, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what a script has open would stay open
