"""What `pack` and `convert` share: the work, and what is said of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import format_count, print_lines, printable

if TYPE_CHECKING:
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
        pack: Does the work: one of the functions of `packing`.
        source: Its first argument.
        out: Its second argument.
        options: Its third argument.
        as_json: Print one line of JSON.
        is_recoded: False for `convert`, which keeps the images' bytes.
    """
    from ..dataset.manifest import STATE
    from .summaries import format_packed, summarise

    started = time.perf_counter()
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
        done = f"task {options.task.index} of {options.task.count} is done"
        print(f"{done}; other tasks have {format_count(manifests.num_missing, 'shard')} to write")
