"""The commands `datapipe cache …`: how far a copy is; what lies in a cache, what is removed from it, what is kept."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import format_count, print_lines, printable
from ..errors import StagingError, WrongPathError
from ..foreign import user_name
from ..fsio import atomic_write
from ..locks import lock_holders
from ..memory import parse_bytes
from ..watched import TIMEOUT_S
from .parameters import AsJson, Timeout, folder_named

cache = typer.Typer(
    help="Look at the copies on a node's disk, wait for them, and care for them.",
    epilog="Example:  datapipe cache list /local/cache",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Cache = Annotated[Path, folder_named("CACHE", "Folder that contains the copies.")]
Local = Annotated[Path, folder_named("LOCAL", "A copy, or the folder of those of its splits.")]


@cache.command("list", epilog="Example:  datapipe cache list /local/cache")
def list_copies(folder: Cache, as_json: AsJson = False) -> None:
    """List the copies in a folder, and who uses them."""
    rows = describe_copies(folder)
    if as_json:
        print(json.dumps(rows))
        return
    table = [("folder", "source", "size", "last used", "state")]
    for row in rows:
        used, size = _format_time(row["last_used"]), f"{row['size_bytes'] / 2**20:,.1f} MiB"
        state = "; ".join(_states(row)) or "unused"
        table.append((printable(row["folder"]), printable(row["source"]), size, used, printable(state)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


@cache.command(epilog="Example:  datapipe cache clean /local/cache --free 200GiB")
def clean(
    folder: Cache,
    free: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove unused copies until so much is free, e.g. 200GiB.")
    ] = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Remove what no job needs any more."""
    from ..cluster import ended_job
    from ..staging.cache import clean

    needed = parse_bytes("free", free) if free is not None else 0
    done = clean(folder, ended_job(os.environ), needed, timeout)
    if as_json:
        rows = [{"folder": str(copy.folder), "source": copy.source, "size_bytes": copy.size_bytes, "why": why}
                for copy, why in done.removed]  # fmt: skip
        print(json.dumps({"leases": [*map(str, done.leases)], "removed": rows, "free_bytes": done.free_bytes}))
    else:
        for path in done.leases:
            print_lines(f"removed {path}: the job has ended")
        for copy, why in done.removed:
            print_lines(f"removed {copy.folder}, {copy.size_bytes / 2**20:,.1f} MiB: {why}")
        count = format_count(len(done.removed), "copy", "copies")
        print_lines(f"{folder}: {count} removed, {done.free_bytes:,} bytes free")
    if done.free_bytes < needed:
        message = f"{folder}: {needed:,} bytes were to be free; the other copies are in use, kept or pinned"
        print(printable(message), file=sys.stderr)
        raise typer.Exit(1)


@cache.command(epilog="Example:  datapipe cache pin /local/cache/imagenet")
def pin(local: Local) -> None:
    """Keep a copy: it is neither removed nor replaced."""
    from ..staging.folder_content import ORIGIN
    from ..staging.lease import PINNED

    _check_own(local)
    if not any(local.glob(ORIGIN)) and not any(local.glob(f"*/{ORIGIN}")):
        raise StagingError("is not a copy, and holds none", path=local)
    with atomic_write(local / PINNED, alone=False, is_own=True):
        pass


@cache.command(epilog="Example:  datapipe cache unpin /local/cache/imagenet")
def unpin(local: Local) -> None:
    """Undo pin."""
    from ..staging.lease import PINNED

    _check_own(local)
    try:
        (local / PINNED).unlink()
    except FileNotFoundError as error:
        raise StagingError("is not pinned", path=local) from error


def _check_own(local: Path) -> None:
    if not local.is_dir():
        raise WrongPathError("is not a folder", path=local)
    if (owner := local.stat().st_uid) != os.geteuid():
        raise StagingError(f"is user {user_name(owner)}'s: only that user can pin or unpin it", path=local)


@cache.command(epilog="Example:  datapipe cache status /local/imagenet --json")
def status(local: Local, as_json: AsJson = False) -> None:
    """Say how far staging to a folder is: whole, running or stopped."""
    from ..staging.progress import find_progress

    progress = find_progress(local)
    print_lines(json.dumps(vars(progress)) if as_json else f"{local}: {progress}")


@cache.command(epilog="Example:  datapipe cache wait /local/imagenet")
def wait(
    local: Local,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without a change.")] = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Wait until what stages to a folder in the background is done."""
    from ..staging.progress import wait_until_whole

    progress = wait_until_whole(local, timeout)
    print_lines(json.dumps(vars(progress)) if as_json else f"{local}: {progress}")


def describe_copies(cache: Path) -> list[dict[str, Any]]:
    """Return what `datapipe cache list` tells of each copy, as JSON values. Raises WrongPathError for no folder."""
    from ..dataset.block_slots import SLOTS
    from ..dataset.manifest import MANIFEST
    from ..staging.cache import is_evictable
    from ..staging.folder_content import find_copies

    if not cache.is_dir():
        raise WrongPathError("is not a folder", path=cache)
    return [
        {
            "folder": str(copy.folder),
            "source": copy.source,
            "owner": user_name(copy.owner),
            "size_bytes": copy.size_bytes,
            "last_used": copy.last_used,
            "in_use": [row for name in (MANIFEST, SLOTS) for row in _list_processes(copy.folder / name, shared=True)],
            "staging": _list_processes(copy.folder, shared=False),
            "kept": [{"job": its.job, "host": its.process.host, "until": its.until} for its in copy.leases],
            "pinned": copy.is_pinned,
            "unfinished": not copy.is_whole,
            "evictable": is_evictable(copy),
        }
        for copy in find_copies(cache)
    ]


def _list_processes(path: Path, shared: bool) -> list[dict[str, Any]]:
    """List the processes that hold a lock, or also those that share it, as far as they can be seen from here."""
    processes = []
    with suppress(OSError):  # there is none, or it is removed at this moment
        for pid in lock_holders(path, shared):
            with suppress(OSError):  # it has ended
                folder = Path("/proc", str(pid))
                name, user = (folder / "comm").read_text().strip(), user_name(folder.stat().st_uid)
                processes.append({"pid": pid, "name": name, "user": user})
    return processes


def _states(row: Mapping[str, Any]) -> list[str]:
    """Return what protects a copy, in words."""
    states = [f"{what} by process {process['pid']} ({process['name']}) of {process['user']}"
              for what, key in (("in use", "in_use"), ("staged to", "staging")) for process in row[key]]  # fmt: skip
    states += [f"kept for job {keep['job']} until {_format_time(keep['until'])}" for keep in row["kept"]]
    states += ["pinned"] if row["pinned"] else []
    if not states and not row["evictable"]:
        mine = row["owner"] == user_name(os.geteuid())
        states.append("in use by a process that cannot be seen from here" if mine else f"{row['owner']}'s")
    return [*states, "unfinished"] if row["unfinished"] else states


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
