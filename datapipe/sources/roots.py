"""Folders of class folders: where they lie in a source, and what speaks against them."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from ..console import format_some
from ..errors import SourceError
from ..split_names import TRAIN, have_twins, is_split_name, named_options, own_splits, split_words, splits_of
from .class_folders import Doubt, doubtful_classes
from .class_tree import ClassTree, RootError
from .file_names import ARCHIVES, EXTENSIONS, is_hidden, is_image, may_have_labels
from .listing import LeftOut, Listing, folders_in, is_folder
from .named_images import doubt_by_table, lists_of_splits

logger = logging.getLogger(__name__)

LOOKED_AT = 100  # entries of a folder, to see whether it holds folders
_MAX_DEPTH = 3  # of folders in which splits are looked for
_MAX_FOLDERS = 3  # of a folder in which splits are looked for: not each of a thousand classes


def class_folder(path: Path) -> str | None:
    """Find a folder in a source that may be a class, or a split: it holds folders of images, or is one of several."""
    folders = folders_below(path) if path.is_dir() else []
    for folder in folders:
        if any(map(_holds_images, folders_below(folder)[:LOOKED_AT])):
            return folder.name
    others = [folder.name for folder in folders if not split_words(folder.name) and _holds_images(folder)]
    return others[0] if len(others) > 1 else None  # train/ and test/ may hold the images of a table


def folders_below(path: Path) -> list[Path]:
    """List the paths of the folders in a folder, sorted, without those that are hidden; none if it cannot be listed."""
    with suppress(OSError):
        return [path / name for name in folders_in(path)]
    return []


def _holds_images(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:  # then none can be read
        return any(is_image(entry.name) for entry in islice(entries, LOOKED_AT))
    return False


def _tables(source: Path, tree: ClassTree) -> list[Path]:
    """List what may be tables of labels: in a source, beside the class folders and in them."""
    inside = [path for content in tree.classes.values() for path in content.others]
    paths = [*(source / name for name in os.listdir(source)), *(tree.root / name for name in (*tree.beside, *inside))]
    return [path for path in dict.fromkeys(paths) if may_have_labels(path.name) and not is_hidden(path.name)]


def _doubt_by_lists(source: Path, tree: ClassTree, doubt: Doubt | None) -> Doubt | None:
    """Doubt that all class folders are for training, where lists of images are called as those of splits."""
    folders = chain(*(content.folders for content in tree.classes.values()))
    is_said = own_splits(source) or any(is_split_name(part) for path, _ in folders for part in path.split("/"))
    if tree.root != source or is_said or (doubt is not None and not doubt.likely):
        return doubt
    lists = sorted(os.path.relpath(path, source) for path in lists_of_splits(tree))
    return Doubt(f"{format_some(lists)} may say which images are for training", "lists") if lists else doubt


def may_hold_samples(folder: Path) -> bool:
    """Whether an image or an archive lies in or below a folder, or what cannot be looked into without leaving it."""
    folders = [str(folder)]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    if entry.name.lower().endswith((*EXTENSIONS, *ARCHIVES)) or (
                        entry.is_symlink() and is_folder(entry)
                    ):
                        return True
                    if is_folder(entry):
                        folders.append(entry.path)
    except OSError:
        return True
    return False


def check_roots(source: Path, trees: Mapping[str, Sequence[ClassTree]], is_chosen: bool = False) -> None:
    """Raise RootError if a root does not look like a folder of class folders; warn if the user chose it.

    Args:
        source: Path that the user has given.
        trees: The class folders of each split.
        is_chosen: Whether the user has said where they are.
    """
    classes = {split: set[str]().union(*(tree.filled() for tree in of_split)) for split, of_split in trees.items()}
    known = set.intersection(*classes.values()) if len(trees) > 1 else set[str]()
    if all(map(is_split_name, known)):
        known = set()
    beside = [name for name in os.listdir(source) if not is_hidden(name)]
    warned: set[str] = set()
    for tree in chain(*trees.values()):
        doubt = tree.doubt(beside if tree.root != source else (), known)
        if doubt and doubt.about == "parts" and len(tree.filled()) == 1 and tree.filled() < classes.get(TRAIN, set()):
            doubt = None  # train has more classes than this one
        if doubt is None and (why := doubt_by_table(tree, _tables(source, tree), len(trees) > 1)):
            doubt = Doubt(why, "parts")
        if len(trees) == 1:
            doubt = _doubt_by_lists(source, tree, doubt)
        if doubt is None or doubt.why in warned or (is_chosen and doubt.about == "split" and doubt.is_slight):
            continue
        if not is_chosen and not (doubt.is_slight and (doubt.about != "split" or tree.root != source)):
            why = doubt.why
            if doubt.about != "lists":
                why = f"does not look like the folder of class folders: {doubt.why}"
            fits = all(of_split <= classes.get(TRAIN, of_split) for of_split in classes.values())
            roots = {split: os.path.relpath(of_split[0].root, source) for split, of_split in trees.items()}
            as_it_is = named_options({split: [glob.escape(root)] for split, root in roots.items()}) if fits else ""
            raise RootError(why, tree.root, doubt, as_it_is)
        warned.add(doubt.why)
        logger.warning("%s: is taken for the folder of class folders, and %s", tree.root, doubt.why)


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
    """Return the class folders that a folder holds: in itself, in one below, or in each of its groups of classes.

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
        tree = ClassTree.scan(source / folder, listing.bounds(source), LeftOut())
    except SourceError:
        return None
    doubt, classes = tree.doubt(), tree.filled()
    if not classes or (doubt and doubt.about == "parts"):
        return None
    if doubt is None or doubt.is_slight:
        return Root([glob.escape(folder)], {folder: classes})
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
    """Return the folder that holds class folders for training in one that is called so; "" if there is none.

    Args:
        source: Path that the user has given.
        name: The path below it of the folder, not one of a split itself, in which it is looked for, some folders deep.
        listing: Listing with the bounds.
    """
    if is_split_name(os.path.basename(name)) or os.path.islink(source / name):
        return ""
    try:
        inside = folders_in(source / name)
    except OSError:
        return ""
    trains = [inner for inner in inside if splits_of(inner) == {TRAIN}]
    named = trains if have_twins(inside) else filter(is_split_name, trains)
    if any(find_root(source, f"{name}/{inner}", listing) for inner in named):
        return name
    if name.count("/") + 1 >= _MAX_DEPTH or len(inside) > _MAX_FOLDERS:
        return ""
    return next((its for inner in inside if (its := find_splits(source, f"{name}/{inner}", listing))), "")
