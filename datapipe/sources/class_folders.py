"""Whether a folder is the one of class folders, or lies above or below it. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..splits import is_split_name

# Folders of images, whatever they show, and of what lies beside them: no classes.
OF_IMAGES = {"images", "image", "imgs", "img", "jpg", "jpeg", "jpegs", "png", "pngs", "jpegimages"}
NAMED = 3  # folders that a message names


class Doubt(NamedTuple):
    """Why a folder does not look like the folder of class folders."""

    why: str
    likely: str | None = None  # path of the folder that looks right
    is_slight: bool = False  # since each of its folders holds images itself
    names_split: bool = False  # a folder that would be a class: it may be one where the splits are known


def doubt_root(folders: Sequence[tuple[str, int]]) -> Doubt | None:
    """Doubt that a folder is the folder of class folders.

    It may be one level too high (splits, folds or groups of classes, or a folder around all) or too low (a folder of
    images in a class). Class folders with one folder of images in each, such as class/images/1.jpg, are right.

    Args:
        folders: Paths below it of the folders that hold images, and their numbers of images.

    Returns:
        The doubt; None if it looks right.

    >>> doubt_root([("raw/train/cat", 9), ("raw/train/dog", 8)])
    Doubt(why='raw/train names a split, below what would be a class', likely='raw', is_slight=False, names_split=False)
    >>> doubt_root([("photo/images/cat", 9), ("photo/images/dog", 8), ("sketch/images/cat", 7)]).why
    'photo/images/cat, photo/images/dog would be one class, photo'
    """
    if named := list(dict.fromkeys(filter(None, map(_split_below, (path for path, _ in folders))))):
        above = {os.path.dirname(path) for path in named}
        why = f"{named[0]} names a split, below what would be a class"
        return Doubt(why, above.pop() if len(above) == 1 else None)
    tops = Counter(path.split("/")[0] for path, _ in folders)
    if called := next(filter(is_split_name, tops), None):
        holds_images = sum(tops.values()) == len(tops) > 2 and any(path == called for path, _ in folders)
        return Doubt(f"{called} names a split, and would be a class", None, holds_images, names_split=True)
    own = {path: count for path, count in folders if "/" not in path}
    if 2 * sum(own.values()) > sum(count for _, count in folders):  # a few folders below do not matter
        name = next((name for name in tops if name.lower() in OF_IMAGES), None)
        return Doubt(f"{name} would be a class") if name else None
    if len(tops) == 1 and not own:
        return Doubt(f"{next(iter(tops))} would be the only class", _likely_root(folders))
    for top in sorted(top for top, count in tops.items() if count > 1):
        if len(inside := _groups([path for path, _ in folders if path.startswith(f"{top}/")])) > 1:
            why = f"{_some(inside)} would be one class, {top}"
            return Doubt(why, _likely_root(folders), 1 < len(own) == len(tops))
    return None


def _groups(paths: Sequence[str]) -> list[str]:
    """Return the folders in which paths lie, one step below what all have in common."""
    common = os.path.commonpath(paths)
    return sorted({"/".join(path.split("/")[: common.count("/") + 2]) for path in paths if path != common})


def _split_below(path: str) -> str | None:
    """Return the first part of a path, below its top folder, that names a split."""
    parts = path.split("/")
    at = next((at for at in range(1, len(parts)) if is_split_name(parts[at])), None)
    return None if at is None else "/".join(parts[: at + 1])


def _likely_root(folders: Sequence[tuple[str, int]]) -> str | None:
    """Return the folder that holds those of images, or those that `images` are in; None if there are several."""
    classes = {os.path.dirname(path) if os.path.basename(path).lower() in OF_IMAGES else path for path, _ in folders}
    above = {os.path.dirname(path) for path in classes}
    return above.pop() or None if len(above) == 1 else None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)
