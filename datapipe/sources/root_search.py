"""Where the class folders, or the splits of them, lie below a source."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import NamedTuple

from ..errors import SourceError
from ..split_names import SPLIT_OF, TRAIN, have_twins, is_split_name, split_words
from .class_tree import ClassTree
from .joined import doubtful_classes
from .listing import LeftOut, Listing
from .roots import folders_in

MAX_DEPTH = 3  # of folders in which splits are looked for
MAX_FOLDERS = 3  # of a folder in which splits are looked for: not each of a thousand classes


class Root(NamedTuple):
    """Class folders that were found.

    `patterns`: for `--split`, below the source; `folders`: those that it names, and the classes with images of each.
    """

    patterns: list[str]
    folders: dict[str, set[str]]

    @property
    def classes(self) -> set[str]:
        """The names of the classes of all folders."""
        return set[str]().union(*self.folders.values())

    @property
    def is_clear(self) -> bool:
        """Whether classes of one name in several folders are one class."""
        return not doubtful_classes(self.folders)


def find_root(source: Path, folder: str, listing: Listing, seen: frozenset[str] = frozenset()) -> Root | None:
    """Find the class folders that a folder holds: in itself, in one below, or in each of its groups of classes.

    Args:
        source: Path that the user has given.
        folder: The folder's path below it; ".": itself.
        listing: Listing with the bounds.
        seen: Folders that it lies in, without links: these may lead in a circle.

    Returns:
        What was found; None: nothing, or nothing that is clear.
    """
    real = os.path.realpath(source / folder)
    if real in seen:
        return None
    seen |= {real}
    try:
        tree = ClassTree.scan(source / folder, None if listing.outside else str(source), LeftOut())
    except SourceError:
        return None
    doubt, classes = tree.doubt(), tree.filled()
    if not classes or (doubt and doubt.about == "parts"):
        return None
    if doubt is None or doubt.is_slight:
        return Root([glob.escape(folder)], {folder: tree.filled()})
    if doubt.likely:
        return find_root(source, os.path.join(folder, doubt.likely), listing, seen)
    if doubt.about != "groups":
        return None
    above = os.path.normpath(folder)
    roots = {name: find_root(source, os.path.normpath(os.path.join(above, name)), listing, seen) for name in classes}
    inner = {name: root for name, root in roots.items() if root is not None}
    tails = {
        root.patterns[0].removeprefix(glob.escape(os.path.normpath(os.path.join(above, name))))
        for name, root in inner.items()
    }
    pattern = os.path.normpath(os.path.join(glob.escape(above), f"*{min(tails, default='')}"))
    matched = [path for path in glob.glob(pattern, root_dir=source) if (source / path).is_dir()]
    if len(inner) < len(roots) or len(tails) > 1 or len(matched) != len(roots):
        return None
    return Root([pattern], {folder: its for root in inner.values() for folder, its in root.folders.items()})


def find_splits(source: Path, name: str, listing: Listing) -> str:
    """Find the folder, not one of a split itself, that holds class folders for training in one that is called so.

    Args:
        source: Path that the user has given.
        name: The folder's path below it; folders in it are looked into, MAX_DEPTH deep at most.
        listing: Listing with the bounds.

    Returns:
        Its path below the source; "" if there is none.
    """
    if is_split_name(os.path.basename(name)) or os.path.islink(source / name):
        return ""
    try:
        inside = folders_in(source / name)
    except OSError:
        return ""
    trains = [inner for inner in inside if {SPLIT_OF[word] for word in split_words(inner)} == {TRAIN}]
    named = trains if have_twins(inside) else filter(is_split_name, trains)
    if any(find_root(source, f"{name}/{inner}", listing) for inner in named):
        return name
    if name.count("/") + 1 >= MAX_DEPTH or len(inside) > MAX_FOLDERS:
        return ""
    return next((its for inner in inside if (its := find_splits(source, f"{name}/{inner}", listing))), "")
