"""What a pack will write, decided before anything is written: every sample's key, and the samples of each shard.

A plan depends only on the source, the seed and the options. It is saved in the pack's folder (see `state`), so
that only the first task lists the source, and a resumed pack continues with the same plan.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..console import format_count
from ..dataset.index import KEY
from ..fsio import side_by_side
from ..sampling.order import PACK, permutation
from ..sources import Samples, Source

# Tar headers hold names of 100 bytes (POSIX ustar); an extension and a counter must fit too.
MAX_KEY_BYTES = 80
_PROBED_SAMPLES = 96  # whose mean size stands for all when shards are planned: no stat per file
_NAMED = 3  # samples that a message names


@dataclass(frozen=True)
class SplitPlan:
    """The plan of one split: its samples' keys, and how they are divided into shards."""

    split: str
    samples: Samples
    keys: list[str]
    shards: list[np.ndarray]  # int64: the samples of each, in the order in which they are written
    mean_bytes: float  # of an image in the source, about


@dataclass(frozen=True)
class PackPlan:
    """The plan of a pack. `settings`: all that its bytes depend on, and where the source is (JSON values)."""

    settings: dict[str, Any]
    kind: str
    classes: list[str]
    splits: list[SplitPlan]

    @property
    def num_samples(self) -> int:
        """How many samples all splits have."""
        return sum(len(split.samples) for split in self.splits)

    @property
    def num_shards(self) -> int:
        """How many shards all splits have."""
        return sum(len(split.shards) for split in self.splits)


def make_plan(source: Source, settings: dict[str, Any], overhead: int = 0, share: float = 1.0) -> PackPlan:
    """Plan to pack all splits of a source, each shuffled once; a source that is `ordered` keeps order and keys.

    Args:
        source: Source to pack.
        settings: Settings with the `seed`, and `shard_mib`, the aimed size of a shard in MiB.
        overhead: Bytes that a sample costs beside its image.
        share: Stored bytes per byte of an image in the source.

    Returns:
        The plan.
    """
    splits, seed, shard_bytes = [], settings["seed"], settings["shard_mib"] * (1 << 20)
    for split, samples in source.splits.items():
        mean = mean_bytes(samples, seed)
        keys = list(samples.names) if source.ordered else make_keys(samples.names)
        order = np.arange(len(samples)) if source.ordered else shuffle(len(samples), samples.blocks, seed)
        shards = divide_into_shards(order, mean * share + overhead, shard_bytes)
        splits.append(SplitPlan(split, samples, keys, shards, mean))
    return PackPlan(settings, source.kind, source.classes, splits)


def source_changes(plan: PackPlan, source: Source) -> str:
    """Say which samples, by name and class, a source has gained and lost since it was planned; "" for none."""
    planned = {split.split: split.samples for split in plan.splits}
    if plan.classes == source.classes and planned.keys() == source.splits.keys():
        pairs = [(samples, source.splits[split]) for split, samples in planned.items()]
        if all(was.names == now.names and np.array_equal(was.labels, now.labels) for was, now in pairs):
            return ""
    before, after = _count_samples(planned, plan.classes), _count_samples(source.splits, source.classes)
    changes = []
    for what, samples in (("gained", after - before), ("lost", before - after)):
        if samples:
            names = [f"{name} of class {label}" for name, label in sorted(samples)[:_NAMED]]
            changes.append(
                f"{what} {format_count(samples.total(), 'image')} ({', '.join(names)}{', …' * (len(samples) > _NAMED)})"
            )
    return " and ".join(changes) or "another order of its images, or other classes"


def _count_samples(splits: Mapping[str, Samples], classes: Sequence[str]) -> Counter[tuple[str, str]]:
    return Counter(
        (f"{split}/{name}", classes[label])
        for split, samples in splits.items()
        for name, label in zip(samples.names, samples.labels.tolist(), strict=True)
    )


def make_keys(names: Sequence[str]) -> list[str]:
    """Make unique keys that WebDataset, tar and LMDB accept as they are, from the samples' paths in the source.

    WebDataset cuts a name at the first dot of its last part, so only ASCII letters, digits, `_` and `-` of each path
    stay; accents are dropped, and everything else becomes `_`. A key that an earlier sample has gets a counter: `-2`,
    `-3`, … Paths too long for a tar header keep their end.

    >>> make_keys(["cat/été 1", "cat/été.1", "dog/2"])
    ['cat/ete_1', 'cat/ete_1-2', 'dog/2']
    """
    if (
        len(set(names)) == len(names)
        and all(map(KEY.fullmatch, names))
        and max(map(len, names), default=0) <= MAX_KEY_BYTES
    ):
        return list(names)  # the usual case, and the fast one
    used: set[str] = set()
    counters: dict[str, int] = {}
    keys = []
    for name in names:
        base = key = _safe(name)
        while key in used:
            counters[base] = counters.get(base, 1) + 1
            key = f"{base}-{counters[base]}"
        used.add(key)
        keys.append(key)
    return keys


def _safe(name: str) -> str:
    """Return a key made of a path, which other paths may share."""
    if not KEY.fullmatch(name):
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "replace").decode()
        ascii_name = "".join(c for c, plain in zip(unicodedata.normalize("NFKD", name), ascii_name, strict=True)
                             if not unicodedata.combining(c) or plain != "?")  # fmt: skip
        parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) or "_" for part in ascii_name.split("/")]
        name = "/".join(parts)
    return name[-MAX_KEY_BYTES:].lstrip("/")


def shuffle(num_samples: int, blocks: np.ndarray | None, seed: int) -> np.ndarray:
    """Shuffle samples, keeping those of a block together.

    Args:
        num_samples: Number of samples.
        blocks: Block of each sample, int64[num_samples]; None: each sample is read by itself.
        seed: Seed of the shuffle, 0 and more.

    Returns:
        A uniform permutation, int64[num_samples]; with blocks, a permutation of the blocks and one in each block.
    """
    order = permutation(num_samples, seed, 0, PACK)
    if blocks is None:
        return order
    _, number = np.unique(blocks, return_inverse=True)
    place = permutation(int(number.max()) + 1, seed, 2, PACK)
    return order[np.argsort(place[number[order]], kind="stable")]


def divide_into_shards(order: np.ndarray, mean_bytes: float, shard_bytes: float) -> list[np.ndarray]:
    """Divide samples into shards of equal counts, one more or less.

    Args:
        order: Samples in the order in which they are written, int64[N].
        mean_bytes: Approximate mean number of bytes that a sample takes in a shard.
        shard_bytes: Aimed size of a shard, in bytes.

    Returns:
        The consecutive samples of each shard, at least one.
    """
    num_shards = min(len(order), max(1, round(len(order) * mean_bytes / shard_bytes)))
    return np.array_split(order, num_shards)


def mean_bytes(samples: Samples, seed: int) -> float:
    """Return the mean size in bytes of a few encoded images, chosen by the seed."""
    probed = permutation(len(samples), seed, 1, PACK)[:_PROBED_SAMPLES]
    return float(np.mean(side_by_side(samples.size_bytes, probed.tolist())))
