"""The end of a pack: write the index, keys and manifest of each split, from the journals of its shards."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..console import format_count
from ..dataset.index import write_index, write_keys
from ..dataset.manifest import INDEX, KEYS, QUARANTINE, Manifest
from ..errors import SourceError
from ..fsio import atomic_write, sync_folder
from ..sources import place_in_source
from ..sources.packed import quarantined
from ..split_names import TRAIN, VAL
from .out_folder import OutFolder
from .plan import PackPlan, SplitPlan
from .shard import file_info
from .state import PackedShard

logger = logging.getLogger(__name__)


def complete(plan: PackPlan, out: OutFolder, max_bad: int) -> dict[str, Manifest]:
    """Write the index, keys and manifest of each split, and put the splits in their place.

    Another process may do the same at the same time.

    Args:
        plan: Plan of what was packed.
        out: Folder of the pack; its journals name all shards of the plan.
        max_bad: Greatest number of samples that may be bad.

    Returns:
        The manifests by split.

    Raises:
        SourceError: More than `max_bad` samples are bad, or all of a split.
    """
    try:
        with out.note_finishing():
            packed = _read_journals(plan, out)
            _check_bad(plan, packed, max_bad)
            _check_copies(plan.settings["source"], {split: _records(shards) for split, shards in packed.items()})
            for split in plan.splits:
                # In a folder of its own: when another task does the same, whole files replace whole files.
                with tempfile.TemporaryDirectory(prefix="manifest-", dir=out.state) as folder:
                    _write_manifest(plan, split, packed[split.split], Path(folder))
                    for name in os.listdir(folder):
                        os.replace(Path(folder, name), out.new_folder(split) / name)
                sync_folder(out.new_folder(split))
            out.end()
    except OSError:  # ENOENT, or ESTALE on a shared filesystem, where another process was faster
        out.settle()
        if not out.is_whole():
            raise
    return out.read_manifests()


def _read_journals(plan: PackPlan, out: OutFolder) -> dict[str, list[PackedShard]]:
    """Read the finished shards of each split. Raises FileNotFoundError when a journal does not have all of them."""
    packed: dict[str, list[PackedShard]] = {}
    for split in plan.splits:
        journal = out.journal(split)
        packed[split.split] = [shard for i in range(len(split.shards)) if (shard := journal.read(i))]
        if len(packed[split.split]) < len(split.shards):
            raise FileNotFoundError(errno.ENOENT, "finished shards are no longer known", str(journal.folder))
    return packed


def _check_bad(plan: PackPlan, packed: dict[str, list[PackedShard]], max_bad: int) -> None:
    """Raise SourceError when too many samples are bad, or all of a split."""
    bad = [bad for shards in packed.values() for shard in shards for bad in shard.bad]
    if len(bad) > max_bad:  # each task has counted only its own
        num_bad = format_count(len(bad), "sample is", "samples are")
        message = f"cannot be packed: {bad[0].reason}; {num_bad} bad, and --max-bad allows {max_bad}"
        raise SourceError(message, path=bad[0].path)
    for split, shards in packed.items():
        if not any(shard.info for shard in shards):
            raise SourceError(f"split {split} holds no image that can be packed", path=plan.settings["source"])


def _check_copies(source: str, records: Mapping[str, np.ndarray]) -> None:
    """Warn of images that are there twice, wherever they came from: copies, links, rows of tables.

    Two images are told apart by 32 bits of checksum and their size: of ImageNet's, the chance that any two agree by
    accident is about 1 in 500. Raises SourceError when all images of val are train's.
    """
    identities = {
        split: images["checksum"].astype(np.uint64) << np.uint64(32) | images["size"]
        for split, images in records.items()
    }
    for split, images in records.items():
        distinct, first, inverse = np.unique(identities[split], return_index=True, return_inverse=True)
        if num_copies := len(images) - len(distinct):
            others = int((images["label"] != images["label"][first[inverse]]).sum())
            classes = f", {others:,} of them as another class" if others else ""
            copies = format_count(num_copies, "image is a copy", "images are copies")
            logger.warning("%s: %s of others in %s, byte for byte%s", source, copies, split, classes)
    if {TRAIN, VAL} <= records.keys():
        num_shared = int(np.isin(identities[VAL], identities[TRAIN]).sum())
        if num_shared == len(records[VAL]):
            message = "all images of val are train's, byte for byte: val would measure nothing"
            raise SourceError(f"{message}; to pack train alone, name it with --split", path=source)
        if num_shared:
            shared = format_count(num_shared, "image")
            logger.warning("%s: %s of val are train's, too, byte for byte", source, shared)


def _records(packed: list[PackedShard]) -> np.ndarray:
    """Return the records of all shards that have any."""
    return np.concatenate([shard.records for shard in packed if shard.info])


def _write_manifest(plan: PackPlan, split: SplitPlan, packed: list[PackedShard], folder: Path) -> None:
    """Write the files of a split that describe its shards, the manifest last."""
    lines, keys = list(quarantined(split.samples)), []
    for shard, which in zip(packed, split.shards, strict=True):
        bad = {bad.number for bad in shard.bad}
        keys += [split.keys[i] for place, i in enumerate(which.tolist()) if place not in bad]
        for b in shard.bad:
            path = place_in_source(split.samples, b.path)
            lines.append(json.dumps({"path": path, "key": split.keys[which[b.number]], "reason": b.reason}))
    shards = [shard for shard in packed if shard.info]
    for number, shard in enumerate(shards):
        shard.records["shard"] = number
    records = _records(shards)
    width, height = _common_size(records["width"]), _common_size(records["height"])
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
        channels=plan.settings["recode"].get("channels") or max(shard.channels for shard in shards),
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


def _common_size(sizes: np.ndarray) -> int | None:
    """Return the size that all images have; None when they differ."""
    return int(sizes[0]) if (sizes == sizes[0]).all() else None
