"""What a pack will write, decided before anything is written: every sample's key, and the samples of each shard.

A plan depends only on the source, the seed and the options. It is saved in the pack's folder, so that the source
is listed by whichever task comes first, and a resumed pack continues with the same plan.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.index import KEY
from ..errors import ManifestError
from ..fsio import UNREADABLE, atomic_write, side_by_side
from ..sampling.order import PACK, permutation
from ..sources import SPLITS, Samples, Source, samples_class, samples_name

# Tar headers hold names of 100 bytes (POSIX ustar); an extension and a counter must fit too.
MAX_KEY_BYTES = 80
PROBED_SAMPLES = 96  # whose mean size stands for all when shards are planned: no stat a file
PLAN = "plan.npz"
PLAN_VERSION = 2  # of the file, and of what else lies in its folder
NAMED = 3  # samples that a message names


@dataclass(frozen=True)
class SplitPlan:
    split: str
    samples: Samples
    keys: list[str]
    shards: list[np.ndarray]  # int64: the samples of each, in the order in which they are written
    mean_bytes: float  # of an image in the source, about


@dataclass(frozen=True)
class Plan:
    """`settings`: everything that the bytes of the result depend on, and where the source is (JSON values)."""

    settings: dict[str, Any]
    kind: str
    classes: list[str]
    splits: list[SplitPlan]

    @property
    def num_samples(self) -> int:
        return sum(len(split.samples) for split in self.splits)

    @property
    def num_shards(self) -> int:
        return sum(len(split.shards) for split in self.splits)


def make_plan(source: Source, settings: dict[str, Any], overhead: int = 0, share: float = 1.0) -> Plan:
    """Plan to pack all splits of a source, each shuffled once; a source that is `ordered` keeps order and keys.

    `settings` has the `seed`, and `shard_mib`, the aimed size of a shard; `overhead`: bytes that a sample costs beside
    its image; `share`: stored bytes for each byte of an image in the source.
    """
    splits, seed, shard_bytes = [], settings["seed"], settings["shard_mib"] << 20
    for split, samples in source.splits.items():
        mean = mean_bytes(samples, seed)
        keys = list(samples.names) if source.ordered else make_keys(samples.names)
        order = np.arange(len(samples)) if source.ordered else shuffle(len(samples), samples.blocks, seed)
        splits.append(SplitPlan(split, samples, keys, cut(order, mean * share + overhead, shard_bytes), mean))
    return Plan(settings, source.kind, source.classes, splits)


def source_changes(plan: Plan, source: Source) -> str:
    """Say what a source has gained and lost since it was planned, by the samples' names and classes; "" for nothing."""
    planned = {split.split: split.samples for split in plan.splits}
    if plan.classes == source.classes and planned.keys() == source.splits.keys():
        pairs = [(samples, source.splits[split]) for split, samples in planned.items()]
        if all(was.names == now.names and np.array_equal(was.labels, now.labels) for was, now in pairs):
            return ""
    before, after = _listed(planned, plan.classes), _listed(source.splits, source.classes)
    changes = []
    for what, samples in (("gained", after - before), ("lost", before - after)):
        if samples:
            names = [f"{name} of class {label}" for name, label in sorted(samples)[:NAMED]]
            changes.append(f"{what} {samples.total()} images ({', '.join(names)}{', …' * (len(samples) > NAMED)})")
    return " and ".join(changes) or "another order of its images, or other classes"


def _listed(splits: Mapping[str, Samples], classes: Sequence[str]) -> Counter[tuple[str, str]]:
    return Counter(
        (f"{split}/{name}", classes[label])
        for split, samples in splits.items()
        for name, label in zip(samples.names, samples.labels.tolist(), strict=True)
    )


def make_keys(names: Sequence[str]) -> list[str]:
    """Unique keys that WebDataset, tar and LMDB take as they are, from the samples' paths in the source.

    WebDataset cuts a name at the first dot of its last part. So of each path only ASCII letters,
    digits, `_` and `-` stay; accents are dropped, all else becomes `_`. A key that an earlier sample has
    gets a counter: `-2`, `-3`, … Paths too long for a tar header keep their end.
    """
    if (
        len(set(names)) == len(names)
        and all(map(KEY.fullmatch, names))
        and max(map(len, names), default=0) <= MAX_KEY_BYTES
    ):
        return list(names)  # as mostly, and sooner
    taken: set[str] = set()
    counters: dict[str, int] = {}
    keys = []
    for name in names:
        base = key = _safe(name)
        while key in taken:
            counters[base] = counters.get(base, 1) + 1
            key = f"{base}-{counters[base]}"
        taken.add(key)
        keys.append(key)
    return keys


def _safe(name: str) -> str:
    if not KEY.fullmatch(name):
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "replace").decode()
        ascii_name = "".join(c for c, plain in zip(unicodedata.normalize("NFKD", name), ascii_name, strict=True)
                             if not unicodedata.combining(c) or plain != "?")  # fmt: skip
        parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) or "_" for part in ascii_name.split("/")]
        name = "/".join(parts)
    return name[-MAX_KEY_BYTES:].lstrip("/")


def shuffle(num_samples: int, blocks: np.ndarray | None, seed: int) -> np.ndarray:
    """int64[num_samples]: a uniform permutation; where samples come in blocks, the blocks' and then each block's."""
    order = permutation(num_samples, seed, 0, PACK)
    if blocks is None:
        return order
    _, number = np.unique(blocks, return_inverse=True)
    place = permutation(int(number.max()) + 1, seed, 2, PACK)
    return order[np.argsort(place[number[order]], kind="stable")]


def cut(order: np.ndarray, mean_bytes: float, shard_bytes: int) -> list[np.ndarray]:
    """Consecutive parts of equal counts (one more or less), of about `shard_bytes` each."""
    num_shards = min(len(order), max(1, round(len(order) * mean_bytes / shard_bytes)))
    return np.array_split(order, num_shards)


def mean_bytes(samples: Samples, seed: int) -> float:
    """Mean size in bytes of a few encoded images, chosen by the seed."""
    probed = permutation(len(samples), seed, 1, PACK)[:PROBED_SAMPLES]
    return float(np.mean(side_by_side(samples.size_bytes, probed.tolist())))


# --- a plan on disk ---------------------------------------------------------------------------------


def save_plan(plan: Plan, folder: Path) -> None:
    """Write `folder/plan.npz`: JSON and arrays, nothing that runs when it is read."""
    arrays: dict[str, np.ndarray] = {}
    splits = []
    for number, split in enumerate(plan.splits):
        names = {}
        for field, value in _fields(split.samples):
            if value is None or isinstance(value, str):
                names[field] = value
                continue
            names[field] = [f"{number}.{field}", "list" if isinstance(value, list) else "array"]
            arrays[f"{number}.{field}"] = _pack_strings(value) if isinstance(value, list) else value
        arrays[f"{number}.keys"] = _pack_strings(split.keys)
        arrays[f"{number}.order"] = np.concatenate(split.shards)
        splits.append(
            {
                "split": split.split,
                "samples": samples_name(split.samples),
                "fields": names,
                "counts": [len(shard) for shard in split.shards],
                "mean_bytes": split.mean_bytes,
            }
        )
    head = {"settings": plan.settings, "kind": plan.kind, "classes": plan.classes, "splits": splits}
    head["version"] = PLAN_VERSION
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    with atomic_write(folder / PLAN, alone=False) as file:  # another task may be writing the same plan
        np.savez(file, **arrays)


def load_plan(folder: Path) -> Plan | None:
    """The plan in a folder; None if there is none. Raises ManifestError."""
    path = folder / PLAN
    try:
        with np.load(path, allow_pickle=False) as content:
            head = json.loads(content["head"].tobytes())
            if head.get("version") != PLAN_VERSION:
                message = "was made by another version of datapipe: let that one finish the pack, or begin again with"
                raise ManifestError(f"{message} --overwrite (of several tasks: remove {folder} first)", path=path)
            splits = [_load_split(content, number, of) for number, of in enumerate(head["splits"])]
            return Plan(head["settings"], head["kind"], head["classes"], splits)
    except FileNotFoundError:
        return None
    except (*UNREADABLE, TypeError, AttributeError) as error:
        message = f"is not a plan that this version can read ({error}); --overwrite begins again"
        raise ManifestError(message, path=path) from error


def _load_split(content, number: int, of: dict) -> SplitPlan:
    values = {}
    for field, value in of["fields"].items():
        if isinstance(value, list):
            array, stored = content[value[0]], value[1]
            value = _unpack_strings(array) if stored == "list" else array
        values[field] = value
    samples = samples_class(of["samples"])(**values)
    keys, order = _unpack_strings(content[f"{number}.keys"]), content[f"{number}.order"]
    if of["split"] not in SPLITS.values():  # it becomes the name of a folder
        raise ValueError(f"{of['split']!r} is not a split")
    if not len(samples) == len(keys) == len(order) == sum(of["counts"]) or order.min() < 0 or order.max() >= len(keys):
        raise ValueError("its keys, its order and its samples do not belong together")
    return SplitPlan(of["split"], samples, keys, np.split(order, np.cumsum(of["counts"])[:-1]), of["mean_bytes"])


def _fields(samples: Samples) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(samples, field.name)) for field in fields(samples) if field.init)


def _pack_strings(strings: list[str]) -> np.ndarray:
    """File names may hold any byte but NUL, so NUL ends each."""
    return np.frombuffer(os.fsencode("".join(f"{string}\0" for string in strings)), np.uint8)


def _unpack_strings(packed: np.ndarray) -> list[str]:
    return os.fsdecode(packed.tobytes()).split("\0")[:-1]
