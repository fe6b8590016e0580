"""Tar shards as WebDataset writes them: `key.jpg` (.jpeg, .png) beside `key.cls` or `key.json`.

How they are named is in `formats.naming`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import SourceError
from ..formats.naming import IMAGES, LABELS, read_label, split_name
from ..formats.tar_listing import Member, list_members
from . import Source
from .archive_members import ListedArchive, join
from .labels import number_labels
from .large_files import has_large_files, large_files
from .listing import LeftOut, Listing, is_in_hidden
from .paths import opened

TAR = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
NOT_NAMED = f"not named .{', .'.join(IMAGES + LABELS)}"
LISTERS = 32  # shards listed at once: hides a shared filesystem's latency


def detect(path: Path) -> str | None:
    return "webdataset" if has_large_files(path, TAR + COMPRESSED) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    bounds = None if listing.outside or not path.is_dir() else str(path)
    shards = large_files(path, listing, TAR + COMPRESSED)
    if not shards:
        raise SourceError("holds no tar shards, neither itself nor in folders train and val", path=path)
    for file in (file for files in shards.values() for file in files):
        if file.lower().endswith(COMPRESSED):
            advice = "unpack it to .tar if it is a shard, or to a folder if it holds folders of images"
            raise SourceError(f"is compressed, so no image in it can be read by itself; {advice}", path=file)
    listed = {split: _list(files, bounds, listing.left_out) for split, files in shards.items()}
    texts = {split: [label for shard in of_split for label in shard.labels] for split, of_split in listed.items()}
    classes, labels = number_labels(path, texts, listing.labels)
    splits = {
        split: join(shards[split], [shard.images for shard in of_split], labels[split])
        for split, of_split in listed.items()
    }
    return Source(kind, classes, splits)


class _Shard(NamedTuple):
    images: ListedArchive
    labels: list[str]


def _list(files: list[str], bounds: str | None, left_out: LeftOut) -> list[_Shard]:
    with ThreadPoolExecutor(LISTERS) as pool:
        return list(pool.map(lambda number: _list_shard(number, files[number], bounds, left_out), range(len(files))))


def _list_shard(number: int, path: str, bounds: str | None, left_out: LeftOut) -> _Shard:
    with opened(path, bounds) as fd:
        archive = list_members(fd, path, keep_content=lambda name: split_name(name)[1] in LABELS)
    left_out.add_members(path, archive.others)
    images: dict[str, Member] = {}
    labels: dict[str, dict[str, bytes]] = {}  # of each key, by extension
    for member in archive.members:
        key, extension = split_name(member.name)
        if is_in_hidden(member.name):
            left_out.add_hidden_member(path, member.name)
        elif extension in LABELS:
            if extension in labels.setdefault(key, {}):
                raise SourceError(f"has two .{extension}", path=path, key=key)
            labels[key][extension] = member.content or b""
        elif extension not in IMAGES:
            left_out.add(f"{path}: {member.name}", NOT_NAMED)
        elif key in images:
            raise SourceError(f"has two images: {images[key].name} and {member.name}", path=path, key=key)
        else:
            images[key] = member
    without = next((key for key in labels if key not in images), None)
    if without is not None:
        raise SourceError("has a label, but no image", path=path, key=without)
    listed = ListedArchive.from_members(number, list(images), list(images.values()))
    texts = [read_label(path, key, labels.get(key, {})) for key in images]
    return _Shard(listed, texts)
