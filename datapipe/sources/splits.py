"""Tell by its name which split a folder or file belongs to, and find the files of a data set of few large files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..dataset.manifest import MANIFEST
from . import SPLITS

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png")


def is_image(name: str) -> bool:
    """Whether a file is named as an image."""
    return name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is to be ignored."""
    return name.startswith(".")


def split_in(name: str) -> str | None:
    """Find the first word of a name that is one of SPLITS: "validation" in "imagenet-validation-000001.tar"."""
    return next((word for word in re.findall("[a-z]+", name.lower()) if word in SPLITS), None)


def pick_splits(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Choose a name, of several in SPLITS, for each split. A test split is used as val if there is no other."""
    picked: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (SPLITS[name], name == "test", name)):
        if SPLITS[name] in picked:
            logger.warning("%s: left out, %s is taken as the val split", path / name, picked[SPLITS[name]])
        else:
            picked[SPLITS[name]] = name
    return picked


def large_files(
    path: Path, suffixes: tuple[str, ...], below: Sequence[str] = (), alone: bool = False
) -> dict[str, list[str]]:
    """Find the files of a data set of few large files.

    They are `path` itself; or lie in it, or in a folder `below`, with the split's name in theirs (without one they
    belong to the train split); or lie in folders that are named as splits.

    Args:
        path: A file or folder.
        suffixes: What the files' names end in, lower case.
        below: Names of folders in `path` that may hold the files.
        alone: Find nothing if folders lie beside the files. Then it is an ImageFolder, whose archive was left there.

    Returns:
        The sorted paths by the split's name, one of SPLITS; {} if there are none.
    """
    if not path.is_dir():
        return _by_split(path.parent, [path.name]) if path.name.lower().endswith(suffixes) else {}
    inside = {entry.name for entry in os.scandir(path)}
    for name in ("", *below):
        if name in inside | {""} and (files := _files_in(path / name, suffixes, alone)):
            return _by_split(path / name, files)
    splits = ((name, path / name) for name in SPLITS if name in inside)
    return {
        name: [str(folder / file) for file in files]
        for name, folder in splits
        if (files := _files_in(folder, suffixes, alone))
    }


def _by_split(folder: Path, names: list[str]) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for name in names:
        paths.setdefault(split_in(name) or "train", []).append(str(folder / name))
    return paths


def _files_in(folder: Path, suffixes: tuple[str, ...], alone: bool) -> list[str]:
    try:
        entries = [entry for entry in os.scandir(folder) if not is_hidden(entry.name)]
    except NotADirectoryError:
        return []
    files = sorted(entry.name for entry in entries if entry.name.lower().endswith(suffixes))
    others = (entry for entry in entries if not entry.name.lower().endswith((*suffixes, *EXTENSIONS)))
    if any(entry.name == MANIFEST for entry in entries):  # a packed data set
        return []
    return [] if files and alone and any(entry.is_dir() for entry in others) else files
