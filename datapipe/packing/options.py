"""The options of a pack, and the values that are allowed for each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import check_bool, check_name, check_seconds, checked_int, is_number
from ..cluster import Task
from ..errors import SettingError
from ..images.recode import RecodeOptions
from ..memory import allowed_bytes, parse_bytes
from ..names import FORMATS, KINDS, LABELS
from ..splits import SplitRule
from ..watched import TIMEOUT_S

SHARD_MIB = 256
MIN_MEMORY_BYTES = 1 << 20
NUMBER_OR_SHARE = re.compile(r"([0-9]{1,18})|([0-9]{1,18}(?:\.[0-9]{1,18})?)%")


@dataclass(frozen=True)
class PackOptions:
    """The options of `pack` and `convert`. Raises SettingError for values that are out of range.

    Attributes:
        format: Format of the shards, one of `names.FORMATS`.
        kind: Kind of the source, one of `names.KINDS`, or "auto" to look.
        shard_mib: Aimed size of a shard in MiB, above 0. None: SHARD_MIB, which is 256, to pack; to convert, as it was.
        workers: Files read at once, at most; None: as many as help, up to 32.
        seed: Seed of the shuffle, 0 and more.
        overwrite: Whether to replace a data set in OUT once the new one is whole.
        resume: Whether to be content when OUT is complete already. An unfinished pack is continued in any case.
        max_bad: Unreadable samples that are left out and listed: a number such as 3, or "0.1%" of all samples.
        outside: Whether to follow links and paths that lead out of the source.
        split: Splits and patterns of their names, such as "val=holdout"; none: what names say (see `splits`).
        labels: Meaning of the labels in tables and archives, one of `names.LABELS` (see `sources.labels`).
        label_column: The column of a table's labels; None: as it is usually called (see `sources`).
        path_column: The column of a CSV table's paths; None: as it is usually called.
        strict: Whether to refuse a source of which something would be left out.
        left_out: A file in which all of that is listed, as lines of JSON; None: the log names ten of each kind.
        timeout_s: Longest time that a read or write may take, in seconds; one that takes longer is an error.
        memory: Memory for images in all threads together, such as "8GiB", at least "1MiB"; None: half of what the
            machine or the control group has.
        recode: Options that say what is stored of each image.
        task: The share of the plan to pack here.
    """

    format: str = "tar"
    kind: str = "auto"
    shard_mib: float | None = None
    workers: int | None = None
    seed: int = 0
    overwrite: bool = False
    resume: bool = False
    max_bad: str | int = "0"
    outside: bool = False
    split: Sequence[str] = ()
    labels: str = "auto"
    label_column: str | None = None
    path_column: str | None = None
    strict: bool = False
    left_out: Path | None = None
    timeout_s: float = TIMEOUT_S
    memory: str | None = None
    recode: RecodeOptions = field(default_factory=RecodeOptions)
    task: Task = field(default_factory=lambda: Task(0, 1, ""))

    def __post_init__(self) -> None:
        check_name("format", self.format, FORMATS)
        check_name("kind", self.kind, ("auto", *KINDS))
        check_name("labels", self.labels, LABELS)
        if isinstance(self.split, str):
            raise SettingError(f"split: {self.split!r} is a text; allowed: a list of them")
        object.__setattr__(self, "split", tuple(self.split))
        SplitRule.parse(self.split)
        object.__setattr__(self, "seed", checked_int("seed", self.seed, 0))  # numpy's integers become Python's
        if self.workers is not None:
            object.__setattr__(self, "workers", checked_int("workers", self.workers, 1))
        if self.shard_mib is not None and not (is_number(self.shard_mib) and 0 < self.shard_mib < math.inf):
            raise SettingError(f"shard_mib: {self.shard_mib!r} is out of range; allowed: numbers above 0")
        check_seconds("timeout_s", self.timeout_s)
        for name in ("overwrite", "resume", "outside", "strict"):
            check_bool(name, getattr(self, name))
        for name, kind in (("recode", RecodeOptions), ("task", Task)):
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"{name}: {getattr(self, name)!r} is not a {kind.__name__}(…)")
        if self.left_out is not None:
            object.__setattr__(self, "left_out", Path(self.left_out))
        self.bad_allowed(1)
        self.memory_bytes()
        if self.overwrite and self.task.count > 1:
            raise SettingError("overwrite: one of several tasks would remove what another writes; remove OUT first")

    def memory_bytes(self) -> int:
        """Return the bytes that images in all threads may take together."""
        if self.memory is None:
            return allowed_bytes() // 2
        num_bytes = parse_bytes("memory", self.memory)
        if num_bytes < MIN_MEMORY_BYTES:
            raise SettingError(f"memory: {self.memory!r} is too little for any image; allowed: from 1MiB")
        return num_bytes

    def bad_allowed(self, num_samples: int) -> int:
        """Return how many of `num_samples` may be unreadable."""
        match = NUMBER_OR_SHARE.fullmatch(str(self.max_bad))
        if not match or (match[2] and float(match[2]) > 100):
            raise SettingError(f"max_bad: {self.max_bad!r} is not a number such as 10 or a share such as 0.1%")
        return int(match[1]) if match[1] else int(num_samples * float(match[2]) / 100)

    def settings(self) -> dict[str, Any]:
        """Return what the bytes of the result depend on, beside the source, as JSON values by the names of SETTINGS."""
        return {
            "format": self.format,
            "seed": self.seed,
            "shard_mib": self.shard_mib,
            "recode": self.recode.settings(),
        }


def begin_again(state: Path) -> str:
    """Say how to begin an unfinished pack again. `state`: the folder in OUT that it keeps its plan in."""
    return f"begin again with --overwrite (of several tasks: remove {state} first)"
