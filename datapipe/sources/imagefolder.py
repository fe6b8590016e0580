"""ImageFolder: `class/image`, or `train/class/image` and `val/class/image`."""

from __future__ import annotations

import glob
import itertools
import logging
import os
from pathlib import Path

from ..errors import SourceError, WrongPathError
from ..splits import SPLIT_OF, AmbiguousSplitError, have_twins, is_split_name, split_words
from . import Source
from .class_tree import LAYOUT, ClassTree, advise_flat
from .labels import number_labels, out_of_order
from .listing import Listing, advise, is_folder, is_hidden, is_image

logger = logging.getLogger(__name__)


def detect(path: Path) -> str:
    return "imagefolder"


def load(path: Path, kind: str, listing: Listing) -> Source:
    if not path.is_dir():
        more = f"{advise([path.name])}; {LAYOUT}"
        raise WrongPathError(f"is not a folder, and not an archive that datapipe knows{more}", path=path)
    roots = _split_roots(path, listing)
    listing.count_beside(path, roots)
    trees = {split: _scan(path, of_split, listing) for split, of_split in roots.items()}
    if not listing.rule.patterns:
        for tree in trees.values():
            tree.check_root(path, {split: folder for split, (folder,) in roots.items()})
    first = trees["train"] if "train" in trees else next(iter(trees.values()))
    if listing.labels == "numbers":
        names = sorted({name for tree in trees.values() for name in tree.classes})
        classes, numbers = number_labels(path, {"": names}, "numbers")
        if len(set(numbers[""].tolist())) < len(names):
            pair = next(pair for pair in itertools.pairwise(sorted(names, key=int)) if int(pair[0]) == int(pair[1]))
            raise SourceError(
                f"{pair[0]} and {pair[1]} are the same number: rename one, or type --labels names", path=path
            )
        label_of = dict(zip(names, numbers[""].tolist(), strict=True))
    else:
        classes = first.names()
        label_of = {name: label for label, name in enumerate(classes)}
        if listing.labels == "auto" and (moved := out_of_order(classes)):
            message = "%s: class folders are numbered, and taken in the order of their texts: %s has label %d; "
            message += "--labels numbers takes the numbers, --labels names this order without a warning"
            logger.warning(message, path, moved, label_of[moved])
    return Source(kind, classes, {split: tree.samples(label_of, listing.left_out) for split, tree in trees.items()})


def _split_roots(path: Path, listing: Listing) -> dict[str, list[Path]]:
    """Find the folders that hold each split's class folders: one each, unless the user names more."""
    entries = [entry for entry in os.scandir(path) if not is_hidden(entry.name)]
    folders = sorted(entry.name for entry in entries if not is_image(entry.name) and is_folder(entry))
    if patterns := listing.rule.patterns:
        chosen = {
            name for _, pattern in patterns for name in glob.glob(pattern, root_dir=path) if (path / name).is_dir()
        }
        others = {name for name in folders if not any(inside.split("/")[0] in (name, ".") for inside in chosen)}
        divided = listing.divide(sorted(chosen | others), path)
        return {split: [path / name for name in names] for split, names in divided.items()}
    if not folders:
        more = f"; {advise_flat(path)}" if any(is_image(entry.name) for entry in entries) else ""
        raise SourceError(f"holds no class folders{more}{advise(e.name for e in entries)}; {LAYOUT}", path=path)
    naming = {name: {SPLIT_OF[word] for word in words} for name in folders if (words := split_words(name))}
    only = [name for name in naming if is_split_name(name)]
    all_name_splits = len(naming) == len(folders) > 0 and len(set().union(*naming.values())) > 1
    # A class may be called "test tube": then it lies beside others, and holds images, not classes.
    if not (
        all_name_splits or len(only) == len(folders) > 0 or len(only) > 1 or have_twins(naming)
        or any(_holds_folders(path / name) for name in naming)
    ):  # fmt: skip
        if not only:
            listing.rule.check_own_name(path)
        return {"train": [path]}
    for entry in entries:
        if entry.name not in folders:
            listing.left_out.add(str(path / entry.name), "beside the folders of splits")
    try:
        divided = listing.divide(folders, path)
    except AmbiguousSplitError as error:
        error.message += "; if all are class folders type --split train=."
        raise
    for split, names in divided.items():
        if len(names) > 1:
            raise SourceError(
                f"holds {len(names)} folders for {split}: {', '.join(names[:5])}; say with --split train=FOLDER and "
                "--split val=FOLDER what to take (both options may be given several times)",
                path=path,
            )
    return {split: [path / names[0]] for split, names in divided.items()}


def _scan(path: Path, roots: list[Path], listing: Listing) -> ClassTree:
    """List the class folders of a split."""
    trees = [ClassTree.scan(root, None if listing.outside else str(path), listing.left_out) for root in roots]
    for tree in trees if listing.rule.patterns else ():
        tree.check_root(is_chosen=True)
    return trees[0] if len(trees) == 1 else ClassTree.merged(path, trees)


def _holds_folders(path: Path) -> bool:
    with os.scandir(path) as entries:
        return any(not is_image(entry.name) and not is_hidden(entry.name) and is_folder(entry) for entry in entries)
