"""Tar shards as WebDataset writes them: `key.jpg` (.jpeg, .png) beside `key.cls` or `key.json`.

How they are named is in `formats.naming`. A field of the JSON, or `key.split`, may say which split a sample belongs to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

from ..console import format_count
from ..errors import SourceError
from ..formats.magic import HEAD_BYTES, advise_unpacking, explain, is_tar
from ..formats.naming import IMAGES, LABEL_FIELDS, LABELS, read_fields, split_name
from ..formats.tar_listing import Member, list_members
from . import Source
from .file_names import is_in_hidden
from .labels import check_same_classes, number_labels
from .large_files import has_large_files, large_files
from .listing import Listing, list_at_once
from .parts import divide_samples, join_files, pick
from .paths import open_checked
from .samples import ArchiveMembers, join_archives
from .shard_names import choose_files
from .split_columns import Columns, Said
from .unpacked import refuse_nested

logger = logging.getLogger(__name__)

_TAR = (".tar",)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_NOT_NAMED = f"not named .{', .'.join(IMAGES + LABELS)}"
_OTHERWISE = f"{_NOT_NAMED} from the first dot on, where WebDataset's extensions begin"
_SPLITS = ("split", "subset", "set")  # extensions of texts that say which split a sample belongs to
_TEXTS = LABELS + _SPLITS
_NO_LABELS = np.zeros(0, np.uint32)
_NO_FIELDS: dict[str, object] = {}
_MAX_DEPTH = 50  # of objects in a JSON


def detect(path: Path) -> str | None:
    return "webdataset" if has_large_files(path, _TAR + _COMPRESSED) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    bounds = listing.bounds(path)
    root, names = large_files(path, listing, _TAR + _COMPRESSED)
    if not names:
        raise SourceError("holds no tar shards, neither itself nor in folders train and val", path=path)
    files = choose_files(names, listing, path, may_wait=False)
    for name in files:
        if name.lower().endswith(_COMPRESSED):
            _check_compressed(str(root / name), bounds)
    listed_shards = list_at_once(lambda file: _list_shard(str(root / file), bounds, listing), files)
    shards = dict(zip(files, listed_shards, strict=True))
    everything = join_archives([shard.images for shard in shards.values()], _NO_LABELS)

    def unlabelled(i: int, file: str) -> SourceError:
        error = shards[file].unlabelled
        assert error is not None
        return error

    texts_of_files = ((file, shard.labels, shard.said) for file, shard in shards.items())
    listed = join_files(texts_of_files, everything.names, unlabelled)
    divided = divide_samples(listed, files, listing, path)
    texts = {split: pick(listed.labels, samples) for split, samples in divided.items()}
    classes, labels = number_labels(path, texts, listing.labels)
    if dotted := [f"{Path(file).name}: {name}" for file, shard in shards.items() for name in shard.dotted]:
        are = format_count(len(dotted), "image has a name", "images have names")
        message = "%s: %s of several dots, such as %s; the last begins the extension here, and in WebDataset the first"
        logger.warning(message, path, are, dotted[0])
    splits = {split: everything.picked(samples, labels[split]) for split, samples in divided.items()}
    return Source(kind, classes, splits)


def _check_compressed(path: str, bounds: str | None) -> None:
    """Raise SourceError for a compressed archive, which one that is named so need not be."""
    with open_checked(path, bounds) as fd:
        head = os.pread(fd, HEAD_BYTES, 0)
    if not is_tar(head):
        raise SourceError(explain(head, path) or f"is compressed{advise_unpacking(path)}", path=path)


class _Shard(NamedTuple):
    images: ArchiveMembers
    labels: list[str]  # "": none
    said: list[Said]  # of each sample's split
    unlabelled: SourceError | None  # for the first image without a label
    dotted: list[str]  # images whose names have more dots than one


def _list_shard(path: str, bounds: str | None, listing: Listing) -> _Shard:
    left_out = listing.left_out
    with open_checked(path, bounds) as fd:
        archive = list_members(fd, path, keep_content=lambda name: name.rpartition(".")[2].lower() in _TEXTS)
        names = _split_names([member.name for member in archive.members])
        if not any(extension in IMAGES for _, extension in names):
            refuse_nested(fd, path, archive.members)
    left_out.add_members(path, archive.others)
    images: dict[str, Member] = {}
    texts: dict[str, dict[str, bytes]] = {}  # of each key, by extension
    others: list[tuple[str, str]] = []  # what is not taken, and its name
    for member, (key, extension) in zip(archive.members, names, strict=True):
        if is_in_hidden(member.name):
            left_out.add_hidden_member(path, member.name)
        elif extension in _TEXTS:
            if extension in texts.setdefault(key, {}):
                raise SourceError(f"has two .{extension}", path=path, key=key)
            texts[key][extension] = member.content or b""
        elif extension not in IMAGES:
            reason = _OTHERWISE if extension.endswith(tuple(f".{end}" for end in IMAGES + LABELS)) else _NOT_NAMED
            left_out.add(f"{path}: {member.name}", reason)
            others.append((reason, member.name))
        elif key in images:
            raise SourceError(f"has two images: {images[key].name} and {member.name}", path=path, key=key)
        else:
            images[key] = member
    without = next((key for key in texts if key not in images and set(LABELS) & texts[key].keys()), None)
    if without is not None:
        raise SourceError(_no_image(without, [*archive.others, *others]), path=path, key=without)
    listed = ArchiveMembers.of_archive(path, list(images), list(images.values()))
    dotted = [member.name for key, member in images.items() if "." in key.rpartition("/")[2]]
    return _Shard(listed, *_read_texts(path, images, texts, listing), dotted)


def _split_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Split names into keys and extensions: at the first dot, as WebDataset does, or else at the last.

    The last dot counts for images that have no extension otherwise, and for texts beside them, if what stands before
    the first dot is not a sample: `2.5.jpg` and `2.5.cls` are one, `a.mask.png` is a part of that of `a.jpg`.
    """
    pairs = [split_name(name) for name in names]
    keys = {key for key, extension in pairs if extension in IMAGES + LABELS}
    stems = [name.removeprefix("./").rpartition(".")[0] for name in names]
    dotted = [extension.rpartition(".")[2] if "." in extension and key not in keys else "" for key, extension in pairs]
    images = {stem for stem, extension in zip(stems, dotted, strict=True) if extension in IMAGES}
    return [
        (stem, extension) if extension in IMAGES + _TEXTS and stem in images else pair
        for pair, stem, extension in zip(pairs, stems, dotted, strict=True)
    ]


def _read_texts(
    path: str, keys: Iterable[str], texts: Mapping[str, Mapping[str, bytes]], listing: Listing
) -> tuple[list[str], list[Said], SourceError | None]:
    """Read what the members beside images say: the labels, the splits, and the error for the first without a label.

    `texts`: the members' contents, by key and extension. Raises SourceError if a label cannot be read.
    """
    columns, labels, said = Columns(listing.rule), [], []
    others_named = {*LABEL_FIELDS, listing.label_column}  # fields that are not of splits
    unlabelled: SourceError | None = None
    twins: dict[str, set[tuple[str, str]]] = {}  # of Label, say: its values, and those of label
    for key in keys:
        contents = texts.get(key, {})
        label, fields = "", _NO_FIELDS
        if set(LABELS) & contents.keys():
            label, fields = read_fields(path, key, contents, listing.label_column)
        elif unlabelled is None:
            advice = "" if any(set(LABELS) & its.keys() for its in texts.values()) else _unpack(path, key)
            unlabelled = SourceError(f"has an image, but no label (.cls or .json){advice}", path=path, key=key)
        for name in () if listing.label_column else fields:
            if (twin := name.lower()) != name and twin in LABEL_FIELDS and twin in fields:
                twins.setdefault(name, set()).add((str(fields[twin]), str(fields[name])))
        values = _values(fields, contents, columns, others_named)
        said.append(columns.said(values) if values else ())
        if len(said[-1]) < len(values):
            others_named.update({name for name, _ in values} - set(columns.alive(name for name, _ in values)))
        labels.append(label)
    for name, pairs in twins.items():
        check_same_classes(path, (name.lower(), name), pairs)
    return labels, columns.keep(said), unlabelled


def _values(
    fields: Mapping[str, object], contents: Mapping[str, bytes], columns: Columns, others_named: set[str | None]
) -> list[tuple[str, str]]:
    """List what may say a sample's split, by name. Fields that cannot are added to `others_named`."""
    values = []
    if any(isinstance(value, dict) for value in fields.values()):
        fields = _flat(fields)
    for name, value in fields.items():
        if name in others_named or isinstance(value, dict):
            continue
        if isinstance(value, str | list | None) or columns.is_named(name):
            values.append((name, "" if value is None else str(value)))
        else:
            others_named.add(name)
    texts = ((name, contents[name].decode("utf-8", "replace").strip()) for name in _SPLITS if name in contents)
    return [*values, *((f".{name}", text) for name, text in texts)]


def _unpack(path: str, key: str) -> str:
    """Say how to unpack a tar without labels: its folders, or itself, may be classes."""
    folder = os.path.splitext(os.path.basename(path))[0]
    what = f"its folders are classes, such as {os.path.dirname(key)}" if "/" in key else "each tar is a class"
    above = quote(os.path.dirname(path))
    command = f"cd {above} && mkdir {quote(folder)} && tar -xf {quote(os.path.basename(path))} -C {quote(folder)}"
    return f"; if {what}, unpack each tar into a folder of its name, and give {above}: {command}"


def _flat(fields: Mapping[str, object], depth: int = _MAX_DEPTH) -> dict[str, object]:
    """Name the fields of objects in a JSON's fields, and in those, as `meta.split`."""
    flat = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and depth:
            flat.update({f"{name}.{field}": inner for field, inner in _flat(value, depth - 1).items()})
    return flat


def _no_image(key: str, others: list[tuple[str, str]]) -> str:
    """Say what lies there in place of a sample's image."""
    beside = [f"{name} ({what})" for what, name in others if split_name(name)[0] == key]
    advice = "; sparse files: pack them without tar's option -S" * any("sparse" in text for text in beside)
    return (
        f"has a label, but no image: {', '.join(beside)} is not taken{advice}"
        if beside
        else "has a label, but no image"
    )
