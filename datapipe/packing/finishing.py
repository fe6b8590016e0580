"""The end of a pack: index, keys and manifest of each split, from what the journals hold of its shards."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from ..dataset.index import write_index, write_keys
from ..dataset.manifest import INDEX, KEYS, QUARANTINE, Manifest
from ..errors import SourceError
from ..fsio import atomic_write, sync_folder
from ..sources.packed import quarantined
from .journal import PackedShard
from .out_folder import Target
from .plan import Plan, SplitPlan
from .shard import file_info


def complete(plan: Plan, target: Target, allowed: int) -> dict[str, Manifest]:
    """Write index, keys and manifest of each split, put the splits in their place, and return the manifests.

    Another process may do the same meanwhile. Raises SourceError when more than `allowed` samples are bad, or all of a
    split.
    """
    try:
        with target.finishing():
            packed = _finished_shards(plan, target)
            _check_finished(plan, packed, allowed)
            for split in plan.splits:
                # In a folder of our own: should another task do the same, whole files replace whole files.
                with tempfile.TemporaryDirectory(prefix="manifest-", dir=target.state) as folder:
                    _write_manifest(plan, split, packed[split.split], Path(folder))
                    for name in os.listdir(folder):
                        os.replace(Path(folder, name), target.place(split) / name)
                sync_folder(target.place(split))
            target.end()
    except FileNotFoundError:
        target.settle()
        if not target.is_whole():
            raise
    return target.manifests()


def _finished_shards(plan: Plan, target: Target) -> dict[str, list[PackedShard]]:
    """What the journals hold of each split. Raises FileNotFoundError."""
    packed: dict[str, list[PackedShard]] = {}
    for split in plan.splits:
        journal = target.journal(split)
        packed[split.split] = [shard for i in range(len(split.shards)) if (shard := journal.read(i))]
        if len(packed[split.split]) < len(split.shards):
            raise FileNotFoundError(errno.ENOENT, "finished shards are no longer known", str(journal.folder))
    return packed


def _check_finished(plan: Plan, packed: dict[str, list[PackedShard]], allowed: int) -> None:
    """Raises SourceError: too many samples are bad, or all of a split."""
    bad = [bad for shards in packed.values() for shard in shards for bad in shard.bad]
    if len(bad) > allowed:  # each task had only its own before its eyes
        message = f"cannot be packed: {bad[0].reason}; {len(bad)} samples are bad, and --max-bad allows {allowed}"
        raise SourceError(message, path=bad[0].path)
    for split, shards in packed.items():
        if not any(shard.info for shard in shards):
            raise SourceError(f"split {split} holds no image that can be packed", path=plan.settings["source"])


def _write_manifest(plan: Plan, split: SplitPlan, packed: list[PackedShard], folder: Path) -> None:
    lines, keys = list(quarantined(split.samples)), []
    for shard, which in zip(packed, split.shards, strict=True):
        bad = {bad.number for bad in shard.bad}
        keys += [split.keys[i] for place, i in enumerate(which.tolist()) if place not in bad]
        for b in shard.bad:
            lines.append(json.dumps({"path": b.path, "key": split.keys[which[b.number]], "reason": b.reason}))
    shards = [shard for shard in packed if shard.info]
    for number, shard in enumerate(shards):
        shard.records["shard"] = number
    records = np.concatenate([shard.records for shard in shards])
    width, height = _common(records["width"]), _common(records["height"])
    if plan.settings["format"] == "npy" and None in (width, height):  # each shard has one size, but not the same
        message = "holds images of differing sizes, and npy shards hold one size: choose --size, or another format"
        raise SourceError(message, path=plan.settings["source"])
    write_index(folder, records)
    write_keys(folder, keys)
    names = [INDEX, KEYS]
    if lines:
        with atomic_write(folder / QUARANTINE) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
        names.append(QUARANTINE)
    converted = sum((Counter(shard.converted) for shard in shards), Counter())
    manifest = Manifest(
        format=plan.settings["format"],
        kind=plan.kind,
        split=split.split,
        num_samples=len(records),
        classes=plan.classes,
        channels=3 if any(shard.channels == 3 for shard in shards) else 1,
        width=width,
        height=height,
        seed=plan.settings["seed"],
        shard_mib=plan.settings["shard_mib"],
        recode=plan.settings["recode"],
        converted=dict(sorted(converted.items())),
        source_bytes=sum(shard.source_bytes for shard in shards),
        image_bytes=int(records["size"].sum(dtype=np.int64)),
        num_bad=len(lines),
        shards=[shard.info for shard in shards],
        files=[file for shard in shards for file in shard.sidecars] + [file_info(folder / name) for name in names],
    )
    manifest.write(folder)


def _common(sizes: np.ndarray) -> int | None:
    return int(sizes[0]) if (sizes == sizes[0]).all() else None
