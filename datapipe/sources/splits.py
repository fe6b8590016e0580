"""Which split a folder or file belongs to, by its name; and the files of a data set that lies in few large ones."""

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
    return name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def split_in(name: str) -> str | None:
    """The first word of a name that is one of SPLITS: "validation" in "imagenet-validation-000001.tar"."""
    return next((word for word in re.findall("[a-z]+", name.lower()) if word in SPLITS), None)


def pick_splits(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Which of the names (all of them in SPLITS) is taken as which split: a test split is val where no other is."""
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
    """The files whose names end in `suffixes`, sorted, by their split's name (one of SPLITS); {} where there are none.

    They are `path` itself, or lie in it or the folder in it that `below` names, with the split's name in theirs
    (else they are of the train split), or in folders that are named as splits.
    `alone`: only where no folders lie beside them; those would be an ImageFolder's, with its archive left there.
    """
    if not path.is_dir():
        return _by_split(path.parent, [path.name]) if path.name.lower().endswith(suffixes) else {}
    inside = {entry.name for entry in os.scandir(path)}
    for name in ("", *below):
        if name in inside | {""} and (found := _files_in(path / name, suffixes, alone)):
            return _by_split(path / name, found)
    splits = ((name, path / name) for name in SPLITS if name in inside)
    return {
        name: [str(folder / file) for file in found]
        for name, folder in splits
        if (found := _files_in(folder, suffixes, alone))
    }


def _by_split(folder: Path, names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(split_in(name) or "train", []).append(str(folder / name))
    return found


def _files_in(folder: Path, suffixes: tuple[str, ...], alone: bool) -> list[str]:
    try:
        entries = [entry for entry in os.scandir(folder) if not is_hidden(entry.name)]
    except NotADirectoryError:
        return []
    found = sorted(entry.name for entry in entries if entry.name.lower().endswith(suffixes))
    others = (entry for entry in entries if not entry.name.lower().endswith((*suffixes, *EXTENSIONS)))
    if any(entry.name == MANIFEST for entry in entries):  # a data set of ours
        return []
    return [] if found and alone and any(entry.is_dir() for entry in others) else found
