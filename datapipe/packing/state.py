"""What OUT/.pack holds: the plan, and the journal of finished shards, so that an interrupted pack can continue.

Each file is an npz of arrays and, as `head`, JSON. Nothing in it is run or imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..dataset.index import RECORD
from ..dataset.manifest import SPLITS, FileInfo, ShardInfo
from ..errors import ManifestError
from ..foreign import open_regular
from ..fsio import UNREADABLE, atomic_write
from ..sources import samples_class, samples_name
from .options import begin_again
from .plan import PackPlan, SplitPlan

PLAN = "plan.npz"
PLAN_VERSION = 2  # of the file, and of what else lies in its folder
Content = TypeVar("Content")


class _OtherVersion(Exception):
    """A file was written by another version of datapipe."""


@dataclass(frozen=True)
class BadSample:
    """A sample that is left out."""

    number: int  # in the plan's order of the shard
    path: str
    reason: str


@dataclass(frozen=True)
class PackedShard:
    """What a manifest needs to know of a finished shard. `info` is None when all its samples were bad: no file then."""

    number: int  # in the plan of the split
    info: ShardInfo | None
    sidecars: list[FileInfo]
    records: np.ndarray  # RECORD[good samples]
    channels: int
    source_bytes: int  # of the good samples' images before they were re-encoded
    converted: dict[str, int] = field(default_factory=dict)
    bad: list[BadSample] = field(default_factory=list)


class Journal:
    """The finished shards of one split: a small file for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, shard: PackedShard) -> None:
        """Record a finished shard, whose files are on disk."""
        head = {
            "info": shard.info and shard.info.model_dump(),
            "sidecars": [sidecar.model_dump() for sidecar in shard.sidecars],
            "channels": shard.channels,
            "source_bytes": shard.source_bytes,
            "converted": shard.converted,
            "bad": [vars(bad) for bad in shard.bad],
        }
        _write(self._path(shard.number), head, {"records": shard.records})

    def read(self, number: int) -> PackedShard | None:
        """Read what is known of a shard; None when it is not finished. Raises ManifestError."""

        def build(head: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> PackedShard:
            records = arrays["records"]
            if records.dtype != RECORD:
                raise _OtherVersion
            head["info"] = head["info"] and ShardInfo(**head["info"])
            head["sidecars"] = [FileInfo(**sidecar) for sidecar in head["sidecars"]]
            head["bad"] = [BadSample(**bad) for bad in head["bad"]]
            return PackedShard(number=number, records=records, **head)

        return _read(self._path(number), self.folder.parent, build)

    def finished(self, numbers: Iterable[int], folder: Path) -> dict[int, int]:
        """Return the finished ones of some shards, whose files are in `folder`, and each one's count of bad samples."""
        shards = ((number, self.read(number)) for number in numbers)
        return {number: len(shard.bad) for number, shard in shards if shard and _is_there(folder, shard)}

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.npz"


def _is_there(folder: Path, shard: PackedShard) -> bool:
    files = shard.sidecars if shard.info is None else [shard.info, *shard.sidecars]
    try:
        return all((folder / file.name).stat().st_size == file.size_bytes for file in files)
    except FileNotFoundError:
        return False


def save_plan(plan: PackPlan, folder: Path) -> None:
    """Write the plan into a folder. Another task may be writing the same plan there."""
    arrays: dict[str, np.ndarray] = {}
    splits: list[dict[str, Any]] = []
    for number, split in enumerate(plan.splits):
        fields: dict[str, Any] = {}  # a value, or the name of an array and what it stands for
        assert dataclasses.is_dataclass(split.samples), f"{type(split.samples)} cannot be saved"
        for name in (known.name for known in dataclasses.fields(split.samples) if known.init):
            value = getattr(split.samples, name)
            if value is None or isinstance(value, str):
                fields[name] = value
                continue
            fields[name] = [f"{number}.{name}", "list" if isinstance(value, list) else "array"]
            arrays[f"{number}.{name}"] = _pack_strings(value) if isinstance(value, list) else value
        arrays[f"{number}.keys"] = _pack_strings(split.keys)
        arrays[f"{number}.order"] = np.concatenate(split.shards)
        splits.append(
            {
                "split": split.split,
                "samples": samples_name(split.samples),
                "fields": fields,
                "counts": [len(shard) for shard in split.shards],
                "mean_bytes": split.mean_bytes,
            }
        )
    head = {"settings": plan.settings, "kind": plan.kind, "classes": plan.classes, "splits": splits}
    _write(folder / PLAN, head | {"version": PLAN_VERSION}, arrays)


def load_plan(folder: Path) -> PackPlan | None:
    """Read the plan in a folder; None if there is none. Raises ManifestError."""

    def build(head: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> PackPlan:
        if head.get("version") != PLAN_VERSION:
            raise _OtherVersion
        splits = [_load_split(arrays, number, split) for number, split in enumerate(head["splits"])]
        return PackPlan(head["settings"], head["kind"], head["classes"], splits)

    return _read(folder / PLAN, folder, build)


def _write(path: Path, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    with atomic_write(path, alone=False) as file:
        np.savez(file, **arrays, head=np.frombuffer(json.dumps(head).encode(), np.uint8))  # type: ignore[arg-type]


def _read(
    path: Path, state: Path, build: Callable[[dict[str, Any], Mapping[str, np.ndarray]], Content]
) -> Content | None:
    """Read a file of a pack, whose folder is `state`; None if there is none. Raises ManifestError."""
    try:
        with open(path, "rb", opener=open_regular) as file, np.load(file, allow_pickle=False) as arrays:
            return build(json.loads(arrays["head"].tobytes()), arrays)
    except FileNotFoundError:
        return None
    except _OtherVersion as error:
        message = "was written by another version of datapipe: let that one finish the pack"
        raise ManifestError(f"{message}, or {begin_again(state)}", path=path) from error
    except (*UNREADABLE, TypeError, AttributeError) as error:
        raise ManifestError(f"cannot be read ({error}): {begin_again(state)}", path=path) from error


def _load_split(content: Mapping[str, np.ndarray], number: int, head: dict[str, Any]) -> SplitPlan:
    """Build the plan of split `number` from its part of the file's head."""
    values = {}
    for name, value in head["fields"].items():
        if isinstance(value, list):
            array, stored = content[value[0]], value[1]
            value = _unpack_strings(array) if stored == "list" else array
        values[name] = value
    try:
        samples = samples_class(head["samples"])(**values)
    except TypeError as error:  # it has other fields in this version
        raise _OtherVersion from error
    keys, order = _unpack_strings(content[f"{number}.keys"]), content[f"{number}.order"]
    split, counts = head["split"], head["counts"]
    if split not in SPLITS:  # it becomes the name of a folder
        raise ValueError(f"{split!r} is not a split")
    if not len(samples) == len(keys) == len(order) == sum(counts) or order.min() < 0 or order.max() >= len(keys):
        raise ValueError("its keys, its order and its samples do not belong together")
    return SplitPlan(split, samples, keys, np.split(order, np.cumsum(counts)[:-1]), head["mean_bytes"])


def _pack_strings(strings: list[str]) -> np.ndarray:
    """Return uint8[bytes]. File names may hold any byte except NUL, so NUL ends each."""
    return np.frombuffer(os.fsencode("".join(f"{string}\0" for string in strings)), np.uint8)


def _unpack_strings(packed: np.ndarray) -> list[str]:
    return os.fsdecode(packed.tobytes()).split("\0")[:-1]
