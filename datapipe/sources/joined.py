"""Folders of class folders that are joined to one split: when classes of one name are one class."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from ..console import format_count, format_some
from ..errors import SourceError
from .class_folders import NUMBER_OR_LETTER
from .class_tree import ClassTree

logger = logging.getLogger(__name__)

TYPED = 8  # folders that are named by an option each


def named_options(patterns: Mapping[str, Iterable[str]]) -> str:
    """Return `--split` options that name the patterns of each split."""
    return " ".join(f"--split {split}={quote(pattern)}" for split, its in patterns.items() for pattern in its)


def are_parts(folders: Collection[str]) -> bool:
    """Whether folders have one name, except for numbers or a letter at the end.

    >>> are_parts(["fold0", "fold1"]), are_parts(["train/part_a", "train/part_b"]), are_parts(["Apple", "Corn"])
    (True, True, False)
    """
    return len({NUMBER_OR_LETTER.sub("", folder.lower()) for folder in folders}) == 1


def shared_classes(folders: Mapping[str, Collection[str]]) -> list[str]:
    """List the classes that are in more than one folder, sorted. `folders`: the classes of each."""
    counts = Counter(name for classes in folders.values() for name in set(classes))
    return sorted(name for name, count in counts.items() if count > 1)


def doubtful_classes(folders: Mapping[str, Collection[str]]) -> list[str]:
    """List the classes of several folders that may be others in each, though they are called the same.

    `healthy` of apples is another class than `healthy` of maize. In folds, and in parts of one set, classes of one name
    are one class: such folders differ in name by a number, and share most of their classes.

    Args:
        folders: The classes of each folder.

    Returns:
        Their names, sorted.

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

    Args:
        splits: The folders of each split, below the source, and the classes of each.

    Returns:
        The text.
    """
    folders = next(its for its in splits.values() if doubtful_classes(its))
    name = doubtful_classes(folders)[0]
    first, second = sorted(folder for folder in folders if name in folders[folder])[:2]
    one_each = "name each folder in an option of its own, as --split train=FOLDER"
    if sum(map(len, splits.values())) <= TYPED:
        options = named_options(
            {split: [glob.escape(folder) for folder in sorted(its)] for split, its in splits.items()}
        )
        one_each = f"type {options} (patterns, one for each folder)"
    return (
        f"if classes of one name are the same in all folders, such as {name} in {first} and in {second}, {one_each}; "
        f"if not, rename them so that each has a name of its own, such as {first}/{os.path.basename(first)}_{name}"
    )


def check_joined(source: Path, trees: Mapping[str, Sequence[ClassTree]], patterns: Collection[str]) -> None:
    """Say which folders are joined. Raises SourceError if classes of one name may be others in each.

    Args:
        source: Path that the user has given.
        trees: The class folders of each split, of several folders.
        patterns: Patterns that the user gave: a folder that one names in full is meant.
    """
    splits = {
        split: {os.path.relpath(tree.root, source): tree.filled() for tree in joined} for split, joined in trees.items()
    }
    for split, folders in splits.items():
        if len(folders) < 2:
            continue
        shared = shared_classes(folders)
        are = f"{format_count(len(shared), 'class is', 'classes are')} in more than one"
        are += f": {format_some(shared)}" if shared else ""
        are_named = all({folder, glob.escape(folder)} & set(patterns) for folder in folders)
        if doubtful_classes(folders) and not are_named:
            what = f"{len(folders)} folders would be joined for {split}, and {are}"
            raise SourceError(f"{what}; {advise_joined(splits)}", path=source)
        log = logger.warning if shared else logger.info
        log("%s: %d folders are joined for %s; %s", source, len(folders), split, are)
