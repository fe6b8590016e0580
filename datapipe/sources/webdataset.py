"""Tar shards as WebDataset writes them: `key.jpg` (.jpeg, .png) beside `key.cls` or `key.json`.

How they are named is in `formats.naming`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import SourceError
from ..formats.naming import IMAGES, LABELS, read_label, split_name
from . import Source
from .archive_members import ListedArchive, join
from .labels import number_labels
from .paths import opened
from .splits import large_files, pick_splits
from .tar_listing import Member, list_members, warn_of_others

TAR = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LISTERS = 32  # shards listed at once: hides a shared filesystem's latency


def detect(path: Path) -> str | None:
    return "webdataset" if large_files(path, TAR + COMPRESSED, alone=True) else None


def load(path: Path, kind: str, outside: bool) -> Source:
    bounds = None if outside or not path.is_dir() else str(path)
    files_by_name = large_files(path, TAR + COMPRESSED)
    if not files_by_name:
        raise SourceError("holds no tar shards, neither itself nor in folders train and val", path=path)
    shards = {split: files_by_name[name] for split, name in pick_splits(path, files_by_name).items()}
    for file in (file for files in shards.values() for file in files):
        if file.lower().endswith(COMPRESSED):
            raise SourceError("is compressed, so no image in it can be read by itself; unpack it to .tar", path=file)
    listed = {split: _list(path, files, bounds) for split, files in shards.items()}
    texts = {split: [label for shard in listing for label in shard.labels] for split, listing in listed.items()}
    classes, labels = number_labels(path, texts)
    splits = {
        split: join(shards[split], [shard.images for shard in listing], labels[split])
        for split, listing in listed.items()
    }
    return Source(kind, classes, splits)


class _Shard(NamedTuple):
    images: ListedArchive
    labels: list[str]
    num_others: int  # members that are no files
    num_left_out: int  # files that are neither image nor label


def _list(path: Path, files: list[str], bounds: str | None) -> list[_Shard]:
    with ThreadPoolExecutor(LISTERS) as pool:
        shards = list(pool.map(lambda number: _list_shard(number, files[number], bounds), range(len(files))))
    others, left_out = (sum(column) for column in list(zip(*shards, strict=True))[2:])
    warn_of_others(path, others, left_out, f"named .{', .'.join(IMAGES + LABELS)}")
    return shards


def _list_shard(number: int, path: str, bounds: str | None) -> _Shard:
    with opened(path, bounds) as fd:
        archive = list_members(fd, path, keep_content=lambda name: split_name(name)[1] in LABELS)
    images: dict[str, Member] = {}
    labels: dict[str, dict[str, bytes]] = {}  # of each key, by extension
    num_left_out = 0
    for member in archive.members:
        key, extension = split_name(member.name)
        if extension in LABELS:
            labels.setdefault(key, {})[extension] = member.content or b""
        elif extension not in IMAGES:
            num_left_out += 1
        elif key in images:
            raise SourceError(f"has two images: {images[key].name} and {member.name}", path=path, key=key)
        else:
            images[key] = member
    without = next((key for key in labels if key not in images), None)
    if without is not None:
        raise SourceError("has a label, but no image", path=path, key=without)
    listed = ListedArchive.from_members(number, list(images), list(images.values()))
    texts = [read_label(path, key, labels.get(key, {})) for key in images]
    return _Shard(listed, texts, archive.num_others, num_left_out)
