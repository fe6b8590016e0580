"""Whether a folder is the one of class folders, and whether classes of one name in several are one. Pure."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..console import format_some
from ..split_names import SPLIT_NOUNS, is_split_name, named_options

# Folders of images, whatever they show, and of what lies beside them: no classes.
OF_IMAGES = {"images", "image", "imgs", "img", "jpg", "jpeg", "jpegs", "png", "pngs", "jpegimages"}
# What the parts of one set of images are called, before their number or letter.
_PARTS = re.compile(f"{SPLIT_NOUNS}|parts?|batch(es)?|chunks?|folds?|cv|subsets?|archives?|zips?|vol(ume)?s?|dirs?")
_WNID = re.compile(r"n[0-9]{8}")  # a class of ImageNet's
_NUMBER = re.compile("[0-9]+")
_NUMBER_OR_LETTER = re.compile("[0-9]+|(?<=[-_ ])[a-z]$")
_TYPED = 8  # folders that are named by an option each


class Doubt(NamedTuple):
    """Why a folder does not look like the folder of class folders.

    `about`: "split", a folder that would be a class is called as a split; "parts", all may be parts of one set of
    images; "groups", they may be groups of classes; "level", it may lie above or below the right one;
    "lists", lists beside it may say which images are for training.
    """

    why: str
    about: str = "level"
    likely: str | None = None  # path of the folder that looks right
    is_slight: bool = False  # since each of its folders holds images itself


def doubt_root(
    folders: Sequence[tuple[str, int]], tables: Sequence[str] = (), known: Collection[str] = ()
) -> Doubt | None:
    """Return why a folder may not be the folder of class folders; None if it looks right.

    It may be one level too high (splits, folds or groups of classes, or a folder around all) or too low (a folder of
    images in a class, or numbered parts of one). Class folders with one folder of images in each, such as
    class/images/1.jpg, are right.

    Args:
        folders: Paths below it of the folders that hold images, and their numbers of images.
        tables: Names of the tables beside them, which may have the labels.
        known: Folders that are classes, since each split has them.

    >>> doubt_root([("raw/train/cat", 9), ("raw/train/dog", 8)])
    Doubt(why='raw/train names a split, below what would be a class', about='level', likely='raw', is_slight=False)
    >>> doubt_root([("photo/images/cat", 9), ("photo/images/dog", 8), ("sketch/images/cat", 7)]).why
    'photo/images/cat, photo/images/dog would be one class, photo'
    >>> doubt_root([("part_1", 9), ("part_2", 8)]).why
    'part_1, part_2 may be parts of one set of images, and would be classes'
    """
    if named := list(dict.fromkeys(filter(None, map(_split_below, (path for path, _ in folders))))):
        above = {os.path.dirname(path) for path in named}
        why = f"{named[0]} names a split, below what would be a class"
        is_clear = len(above) == 1 and not above & {path for path, _ in folders}
        return Doubt(why, likely=above.pop() if is_clear else None)
    tops = Counter(path.split("/")[0] for path, _ in folders)
    own = {path: count for path, count in folders if "/" not in path}
    if len(folders) == 1 and (tables or not own) and not _WNID.fullmatch(folders[0][0]):
        may_have = f", and {format_some(tables)} may have the labels of its images" if tables else ""
        return Doubt(f"{folders[0][0]} would be the only class{may_have}", "parts")
    if len(tops) == 1 and not own:
        return Doubt(f"{next(iter(tops))} would be the only class", likely=_likely_root(folders))
    if called := next((name for name in filter(is_split_name, tops) if not (name in known and name in own)), None):
        hold_images = sum(tops.values()) == len(tops) > 2 and called in own and not all(map(is_split_name, tops))
        return Doubt(f"{called} names a split, and would be a class", "split", is_slight=hold_images)
    if doubt := _doubt_parts(tops, tables, known):
        return doubt
    is_flat = 2 * sum(own.values()) > sum(count for _, count in folders)  # a few folders below do not matter
    if name := next((name for name in (tops if is_flat else own) if name.lower() in OF_IMAGES), None):
        return Doubt(f"{name} would be a class")
    if is_flat:
        return None
    return _doubt_groups(folders, len(own) if len(own) == len(tops) else 0)


def _doubt_groups(folders: Sequence[tuple[str, int]], num_own: int) -> Doubt | None:
    """Doubt folders that hold several of images each. `num_own`: of folders that hold images themselves, if all do."""
    below: dict[str, list[str]] = {}
    for path, _ in sorted(folders):
        if "/" in path:
            below.setdefault(path.split("/")[0], []).append(path)
    for top, paths in below.items():
        if len(inside := _groups(paths)) > 1:
            return Doubt(
                f"{format_some(inside)} would be one class, {top}", "groups", _likely_root(folders), num_own > 1
            )
    return None


def _doubt_parts(tops: Counter[str], tables: Sequence[str], known: Collection[str]) -> Doubt | None:
    """Doubt folders of images that differ by a number, if they are called as parts, or a table may have their labels.

    Without either, `1` and `2`, or `s1` and `s2`, are classes; and so are ImageNet's, such as `n01440764`.
    """
    stems: dict[str, list[str]] = {}
    for name in sorted(tops):
        stem = _NUMBER_OR_LETTER.sub("", name.lower())
        words = re.findall("[a-z]+", stem)
        if words and _PARTS.fullmatch(words[-1]) and stem != name.lower() and tops[name] == 1:
            stems.setdefault(stem, []).append(name)
    parts = next((names for names in stems.values() if len(names) > 1 or len(tops) == 1), None)
    if parts:
        what, would = ("parts", "classes") if len(parts) > 1 else ("a part", "a class")
        return Doubt(f"{format_some(parts)} may be {what} of one set of images, and would be {would}", "parts")
    numbered = len({_NUMBER.sub("", name) for name in tops}) == 1 < len(tops) == sum(tops.values())
    if numbered and tables and not tops.keys() <= set(known) and not all(map(_WNID.fullmatch, tops)):
        may_be = f"{format_some(sorted(tops))} differ by a number alone, and may be parts of one set"
        return Doubt(f"{may_be}, of whose images {format_some(tables)} may have the labels", "parts")
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


def are_parts(folders: Collection[str]) -> bool:
    """Whether folders have one name, except for numbers or a letter at the end.

    >>> are_parts(["fold0", "fold1"]), are_parts(["train/part_a", "train/part_b"]), are_parts(["Apple", "Corn"])
    (True, True, False)
    """
    return len({_NUMBER_OR_LETTER.sub("", folder.lower()) for folder in folders}) == 1


def shared_classes(folders: Mapping[str, Collection[str]]) -> list[str]:
    """List the classes that are in more than one folder, sorted. `folders`: the classes of each."""
    counts = Counter(name for classes in folders.values() for name in set(classes))
    return sorted(name for name, count in counts.items() if count > 1)


def doubtful_classes(folders: Mapping[str, Collection[str]]) -> list[str]:
    """List the classes, given by folder, that may be others in each folder, though they are called the same.

    `healthy` of apples is another class than `healthy` of maize. In folds, and in parts of one set, classes of one name
    are one class: such folders differ in name by a number, and share most of their classes.

    >>> doubtful_classes({"Apple": ["healthy", "scab"], "Corn": ["healthy", "rust"]})
    ['healthy']
    >>> doubtful_classes({"fold0": ["cat", "dog"], "fold1": ["cat", "dog"]}), doubtful_classes({"a": "x", "b": "y"})
    ([], [])
    """
    shared = shared_classes(folders)
    of_most = all(2 * len(set(classes).intersection(shared)) > len(classes) for classes in folders.values())
    return [] if of_most and are_parts(folders) else shared


def advise_joined(splits: Mapping[str, Mapping[str, Collection[str]]]) -> str:
    """Say what to type, or to do, about classes of several folders that may be others in each.

    `splits`: the folders of each split, below the source, and the classes of each.
    """
    folders = next(its for its in splits.values() if doubtful_classes(its))
    name = doubtful_classes(folders)[0]
    first, second = sorted(folder for folder in folders if name in folders[folder])[:2]
    one_each = "name each folder in an option of its own, as --split train=FOLDER"
    if sum(map(len, splits.values())) <= _TYPED:
        options = named_options(
            {split: [glob.escape(folder) for folder in sorted(its)] for split, its in splits.items()}
        )
        one_each = f"type {options} (patterns, one for each folder)"
    return (
        f"if classes of one name are the same in all folders, such as {name} in {first} and in {second}, {one_each}; "
        f"if not, rename them so that each has a name of its own, such as {first}/{os.path.basename(first)}_{name}"
    )
