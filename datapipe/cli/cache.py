"""What `datapipe stage` does instead of staging: say how far it is, wait; list a cache, clean it, pin a copy."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..console import format_count, print_lines, printable
from ..errors import SettingError
from ..memory import parse_bytes

ACTIONS = {
    "status": "--status",
    "wait": "--wait",
    "list_cache": "--list",
    "clean": "--clean",
    "pin": "--pin",
    "unpin": "--unpin",
}
NAMES = {"folder": "DIR", "local": "LOCAL", "as_json": "--json"}  # of arguments that have another one
BESIDE = {
    "status": {"as_json"},
    "wait": {"as_json", "timeout"},
    "list_cache": {"as_json"},
    "clean": {"as_json", "free", "timeout"},
    "pin": set(),
    "unpin": set(),
}


def check_combination(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Find out what to do, from the arguments of `stage`.

    Args:
        given: by name.
        defaults: what they are where nothing is given.

    Returns:
        A key of ACTIONS; "" to stage.

    Raises:
        SettingError: they contradict each other, or some are missing.
    """
    actions = [name for name in ACTIONS if given[name] is not None]
    if not actions:
        if given["folder"] is None or given["local"] is None:
            known = ", ".join(ACTIONS.values())
            raise SettingError(f"DIR and LOCAL: both are needed to stage; without them, give one of {known}")
        if given["free"] is not None:
            raise SettingError("--free: has no meaning without --clean; to make room for LOCAL, give --evict")
        return ""
    action, *rest = actions
    unfit = [ACTIONS[name] for name in rest]
    others = given.keys() - ACTIONS.keys() - BESIDE[action]
    unfit += [NAMES.get(name, f"--{name.replace('_', '-')}") for name in others if given[name] != defaults[name]]
    if unfit:
        raise SettingError(f"{ACTIONS[action]}: stands by itself, and not beside {', '.join(sorted(unfit))}")
    return action


def care_for_cache(action: str, given: Mapping[str, Any]) -> None:
    """Do it, and print what was done.

    Args:
        action: of `check_combination`.
        given: the arguments of `stage`, by name.

    Raises:
        DatapipeError: there is no such folder, or it is another user's.
        SettingError: the size is none.
        typer.Exit: less could be made free than was asked for.
    """
    from ..staging.cleaning import pin, unpin

    folder: Path = given[action]
    if action in ("status", "wait"):
        _tell_progress(folder, given["timeout"] if action == "wait" else None, given["as_json"])
    elif action == "pin":
        pin(folder)
    elif action == "unpin":
        unpin(folder)
    elif action == "list_cache":
        _list(folder, given["as_json"])
    else:
        free = parse_bytes("free", given["free"]) if given["free"] is not None else 0
        _clean(folder, free, given["timeout"], given["as_json"])


def _tell_progress(local: Path, timeout_s: float | None, as_json: bool) -> None:
    from ..staging.progress import find_progress, wait_until_whole

    progress = find_progress(local) if timeout_s is None else wait_until_whole(local, timeout_s)
    print_lines(json.dumps(progress.as_row()) if as_json else f"{local}: {progress}")


def _list(cache: Path, as_json: bool) -> None:
    from ..staging.cleaning import describe

    rows = describe(cache)
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


def _states(row: Mapping[str, Any]) -> list[str]:
    """Return what protects a copy, in words."""
    states = [f"{what} by process {process['pid']} ({process['name']}) of {process['user']}"
              for what, key in (("in use", "in_use"), ("staged to", "staging")) for process in row[key]]  # fmt: skip
    states += [f"kept for job {keep['job']} until {_format_time(keep['until'])}" for keep in row["kept"]]
    states += ["pinned"] if row["pinned"] else []
    if not states and not row["evictable"]:
        mine = row["owner"] == _me()
        states.append("in use by a process that cannot be seen from here" if mine else f"{row['owner']}'s")
    return [*states, "unfinished"] if row["unfinished"] else states


def _me() -> str:
    from ..foreign import user_name

    return user_name(os.geteuid())


def _clean(cache: Path, free: int, timeout_s: float, as_json: bool) -> None:
    from ..cluster import ended_job
    from ..staging.cleaning import clean

    done = clean(cache, ended_job(os.environ), free, timeout_s)
    if as_json:
        rows = [{"folder": str(copy.folder), "source": copy.source, "size_bytes": copy.size_bytes, "why": why}
                for copy, why in done.removed]  # fmt: skip
        print(json.dumps({"leases": [*map(str, done.leases)], "removed": rows, "free_bytes": done.free_bytes}))
    else:
        for path in done.leases:
            print_lines(f"removed {path}: the job has ended")
        for copy, why in done.removed:
            print_lines(f"removed {copy.folder}, {copy.size_bytes / 2**20:,.1f} MiB: {why}")
        print_lines(
            f"{cache}: {format_count(len(done.removed), 'copy', 'copies')} removed, {done.free_bytes:,} bytes free"
        )
    if done.free_bytes < free:
        message = f"{cache}: {free:,} bytes were to be free; the other copies are in use, kept or pinned"
        print(printable(message), file=sys.stderr)
        raise typer.Exit(1)


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
