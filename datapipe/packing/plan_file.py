"""A plan on disk: `plan.npz` in the pack's folder, of JSON and arrays. Nothing in it is run or imported."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.manifest import SPLITS
from ..errors import ManifestError
from ..foreign import open_regular
from ..fsio import UNREADABLE, atomic_write
from ..sources import Samples, samples_class, samples_name
from .options import begin_again
from .plan import PackPlan, SplitPlan

PLAN = "plan.npz"
PLAN_VERSION = 2  # of the file, and of what else lies in its folder


class _OtherVersion(Exception):
    """The plan was made by another version of datapipe."""


def save_plan(plan: PackPlan, folder: Path) -> None:
    """Write the plan into a folder. Another task may be writing the same plan there."""
    arrays: dict[str, np.ndarray] = {}
    splits = []
    for number, split in enumerate(plan.splits):
        fields: dict[str, Any] = {}  # a value, or the name of an array and what it stands for
        for name, value in _fields(split.samples):
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
    head = {
        "settings": plan.settings,
        "kind": plan.kind,
        "classes": plan.classes,
        "splits": splits,
        "version": PLAN_VERSION,
    }
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    with atomic_write(folder / PLAN, alone=False) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for its other arguments


def load_plan(folder: Path) -> PackPlan | None:
    """Read the plan in a folder; None if there is none. Raises ManifestError."""
    path = folder / PLAN
    try:
        with open(path, "rb", opener=open_regular) as file, np.load(file, allow_pickle=False) as content:
            head = json.loads(content["head"].tobytes())
            if head.get("version") != PLAN_VERSION:
                raise _OtherVersion
            splits = [_load_split(content, number, split) for number, split in enumerate(head["splits"])]
            return PackPlan(head["settings"], head["kind"], head["classes"], splits)
    except FileNotFoundError:
        return None
    except _OtherVersion as error:
        message = f"was made by another version of datapipe: let that one finish the pack, or {begin_again(folder)}"
        raise ManifestError(message, path=path) from error
    except (*UNREADABLE, TypeError, AttributeError) as error:
        raise ManifestError(f"is not a plan that can be read ({error}): {begin_again(folder)}", path=path) from error


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


def _fields(samples: Samples) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a class of samples is made from."""
    assert dataclasses.is_dataclass(samples), f"{type(samples)} cannot be saved"
    return ((field.name, getattr(samples, field.name)) for field in dataclasses.fields(samples) if field.init)


def _pack_strings(strings: list[str]) -> np.ndarray:
    """Return uint8[bytes]. File names may hold any byte except NUL, so NUL ends each."""
    return np.frombuffer(os.fsencode("".join(f"{string}\0" for string in strings)), np.uint8)


def _unpack_strings(packed: np.ndarray) -> list[str]:
    return os.fsdecode(packed.tobytes()).split("\0")[:-1]
