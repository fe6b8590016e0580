"""What `pack` and `convert` share: the work, and what is said of it."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import format_count, print_lines, printable

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ..cluster import Task
    from ..packing import PackOptions, PackResult


def pack_and_print(
    pack: Callable[[Path, Path, PackOptions], PackResult],
    source: Path,
    out: Path,
    options: PackOptions,
    as_json: bool,
    is_recoded: bool = True,
) -> None:
    """Pack or convert, and print what is in OUT then.

    Args:
        pack: Function that does the work: one of those of `packing`.
        source: Its first argument.
        out: Its second argument.
        options: Its third argument.
        as_json: Print one line of JSON.
        is_recoded: False for `convert`, which keeps the images' bytes.
    """
    from ..dataset.manifest import STATE
    from .summaries import format_packed, summarise

    started = time.perf_counter()
    if options.task.count > 1:
        logger.info("%s: this is %s", out, name_share(options.task))
    try:
        manifests = pack(source, out, options)
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
        print_lines(*format_packed(out, manifests, seconds, is_recoded))
    else:
        done = f"{name_share(options.task)} is done"
        print(f"{done}; other tasks have {format_count(manifests.num_missing, 'shard')} to write")


def name_share(task: Task) -> str:
    """Say which share of a pack a process has, who says so, and how to have all."""
    share = f"task {task.index} of {task.count}"
    if task.launcher.startswith("--"):
        return share
    return f"{share} (as set by {task.launcher}; --task 0/1 packs everything here)"
