"""ImageFolder: `class/image`, or `train/class/image` and `val/class/image`."""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..console import format_count, format_some
from ..errors import SettingError, SourceError, WrongPathError
from ..split_names import (
    TEST,
    TRAIN,
    VAL,
    have_twins,
    is_split_name,
    named_options,
    splits_of,
    splits_of_name,
)
from ..splits import VAL_OR_TRAIN, AmbiguousSplitError
from . import Source
from .class_folders import advise_joined, doubtful_classes, shared_classes
from .class_tree import LAYOUT, ClassTree, RootError
from .file_names import advise, is_hidden, is_partial
from .labels import number_labels, out_of_order, same_by, warn_of_case
from .listing import Listing, folders_in
from .root_advice import advise_roots
from .roots import check_roots, may_hold_samples
from .table_advice import TOP, advise_writing

logger = logging.getLogger(__name__)

_FILES = {"csv": ".csv", "parquet": ".parquet", "webdataset": ".tar"}  # by kind: what --split may name instead


def detect(path: Path) -> str:
    return "imagefolder"


def load(path: Path, kind: str, listing: Listing) -> Source:
    if not path.is_dir():
        more = f"{advise([path.name])}; {LAYOUT}"
        raise WrongPathError(f"is not a folder, and not an archive that datapipe knows{more}", path=path)
    try:
        trees = _list_trees(path, listing)
    except RootError as error:
        error.message = f"{error.why}{advise_roots(path, listing, error)}; {LAYOUT}"
        raise
    if not listing.rule.patterns and list(trees) == ["train"] and trees["train"].root == path:
        _check_files(path, trees["train"])
    first = trees["train"] if "train" in trees else next(iter(trees.values()))
    if listing.labels == "numbers":
        names = sorted({name for tree in trees.values() for name in tree.classes})
        classes, numbers = number_labels(path, {"": names}, "numbers")
        _check_numbers(path, names)
        label_of = dict(zip(names, numbers[""].tolist(), strict=True))
    else:
        classes = first.names()
        if listing.labels == "auto" and all(map(str.isdecimal, classes)):
            _check_numbers(path, classes)
        label_of = {name: label for label, name in enumerate(classes)}
        if listing.labels == "auto" and (moved := out_of_order(classes)):
            message = "%s: class folders are numbered, and taken in the order of their texts: %s has label %d; "
            message += "--labels numbers takes the numbers, --labels names this order without a warning"
            logger.warning(message, path, moved, label_of[moved])
    warn_of_case(path, classes)
    return Source(kind, classes, {split: tree.samples(label_of, listing.left_out) for split, tree in trees.items()})


def _check_numbers(path: Path, names: Sequence[str]) -> None:
    """Raise SourceError for class folders of the same number, such as 1 and 01."""
    for first, second in same_by(int, sorted(names, key=int)):
        what = f"{first} and {second} are the same number: rename one, or type --labels names"
        raise SourceError(what, path=path)


def _check_files(path: Path, tree: ClassTree) -> None:
    """Raise AmbiguousSplitError for class folders whose images are all called as those of splits, and not of train."""
    splits: dict[str, dict[str, str]] = {}  # by class and split: an image
    image, may_be_trials = "", False
    for name, content in tree.classes.items():
        for image in itertools.chain(*(images for _, images in content.folders)):
            of_image = splits_of(image)
            if len(of_image) != 1:
                return
            may_be_trials |= not splits_of_name(image)
            splits.setdefault(name, {}).setdefault(of_image.pop(), image)
    what = "holds images that are called as those of"
    if mixed := next((images for images in splits.values() if len(images) > 1), None):
        first, second, *_ = sorted(mixed)
        why = f"{what} {first} and {second}, such as {mixed[first]} and {mixed[second]}, and no folder names a split"
        by_name = advise_writing(path, "if their names say which are", TOP)
        raise AmbiguousSplitError(path, why, f"type {named_options({TRAIN: ['.']})} if all are for training; {by_name}")
    of_all = set(itertools.chain(*splits.values()))
    if of_all in ({VAL}, {TEST}) and not may_be_trials:
        why = f"{what} {of_all.pop()}, such as {image}, and no folder names a split"
        raise AmbiguousSplitError(path, why, VAL_OR_TRAIN)


def _list_trees(path: Path, listing: Listing) -> dict[str, ClassTree]:
    """List the class folders of each split. Raises RootError if they are not where they should be."""
    roots = _split_roots(path, listing)
    listing.count_beside(path, roots)
    bounds = listing.bounds(path)
    trees = {
        split: [ClassTree.scan(root, bounds, listing.left_out) for root in of_split]
        for split, of_split in roots.items()
    }
    check_roots(path, trees, is_chosen=bool(listing.rule.patterns))
    _check_links(path, trees)
    _check_joined(path, trees, {pattern for _, pattern in listing.rule.patterns})
    return {split: trees[0] if len(trees) == 1 else ClassTree.merged(path, trees) for split, trees in trees.items()}


def _split_roots(path: Path, listing: Listing) -> dict[str, list[Path]]:
    """Find the folders that hold each split's class folders: one each, unless the user names more."""
    folders = folders_in(path)
    if listing.rule.patterns:
        return _chosen_roots(path, folders, listing)
    beside = set(os.listdir(path)).difference(folders)
    others = sorted(name for name in beside if not is_hidden(name) or is_partial(name))
    if not folders:
        raise RootError(f"holds no class folders{advise(others)}", path)
    naming = {name: splits for name in folders if (splits := splits_of(name))}
    only = [name for name in naming if is_split_name(name)]
    all_name_splits = len(naming) == len(folders) > 0 and len(set().union(*naming.values())) > 1
    # A class may be called "test tube": then it lies beside others, and holds images, not classes.
    if not (
        all_name_splits or len(only) == len(folders) > 0 or len(only) > 1 or have_twins(naming)
        or any(folders_in(path / name) for name in naming)
    ):  # fmt: skip
        if not only:
            listing.rule.check_own_name(path)
        return {"train": [path]}
    bare = _without_images(path, folders, naming)
    listing.left_out.add_all((str(path / name) for name in others), "beside the folders of splits")
    listing.left_out.add_all((str(path / name) for name in bare), "beside the folders of splits, without images")
    try:
        divided = listing.divide([name for name in folders if name not in bare], path)
    except AmbiguousSplitError as error:
        error.message = f"{error.why}{advise_roots(path, listing, error)}"
        raise
    for split, names in divided.items():
        if len(names) > 1:
            raise RootError(f"holds {len(names)} folders for {split}: {', '.join(names[:5])}", path)
    return {split: [path / names[0]] for split, names in divided.items()}


def _without_images(path: Path, folders: Sequence[str], naming: Mapping[str, set[str]]) -> list[str]:
    """List the folders that hold no images: `logs`, and `train_labels` beside `train`; not a split that is empty."""
    empty = [name for name in folders if not may_hold_samples(path / name)]
    filled = [naming[name] for name in naming if name not in empty]
    return [name for name in empty if name not in naming or naming[name] in filled]


def _chosen_roots(path: Path, folders: Sequence[str], listing: Listing) -> dict[str, list[Path]]:
    """Find the folders that the user's patterns name."""
    chosen = set()
    for _, pattern in listing.rule.patterns:
        names = glob.glob(pattern, root_dir=path)
        roots = {name for name in names if (path / name).is_dir()}
        chosen |= roots
        kinds = {kind for name in names for kind, suffix in _FILES.items() if name.lower().endswith(suffix)}
        if kinds and not roots:
            raise SettingError(f"split: {pattern!r} names files in {path}, not folders of class folders; to read them, "
                               f"add --kind {min(kinds)}")  # fmt: skip
    tops = {inside.split("/")[0] for inside in chosen}
    others = set() if "." in tops else set(folders) - tops
    divided = listing.divide(sorted(chosen | others), path)
    return {split: [path / name for name in names] for split, names in divided.items()}


# --- folders that are joined, or linked -------------------------------------------------------------


def _check_joined(source: Path, trees: Mapping[str, Sequence[ClassTree]], patterns: Collection[str]) -> None:
    """Say which folders are joined. Raises SourceError if classes of one name may be others in each.

    A folder that one of the user's patterns names in full is meant.
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


class _Place(NamedTuple):
    split: str
    label: str
    path: str
    images: list[str]


def _check_links(source: Path, trees: Mapping[str, Sequence[ClassTree]]) -> None:
    """Warn of images that linked folders bring into two splits. Only links are followed; the rest costs no request.

    Raises SourceError if two classes, or splits, are the same folder, or all images of val are train's.
    """
    roots: dict[str, Path] = {}
    for tree in (tree for joined in trees.values() for tree in joined):
        if (first := roots.setdefault(os.path.realpath(tree.root), tree.root)) != tree.root:
            twice = f"leads to the same folder as {first}: its images would be taken twice"
            raise SourceError(f"{twice}; remove one, or copy it if both are meant", path=tree.root)
    if not any(content.links for joined in trees.values() for tree in joined for content in tree.classes.values()):
        return
    folders: dict[str, list[_Place]] = {}  # by real path: places that lead to it
    for split, joined in trees.items():
        for tree in joined:
            above = os.path.realpath(tree.root)
            for label, content in tree.classes.items():
                for folder, images in content.folders:
                    place = _Place(split, label, f"{tree.root}/{folder}", images)
                    folders.setdefault(_real(folder, above, content.links), []).append(place)
    shared: dict[str, str] = {}  # images of val, and the places in train that lead to the same
    for places in folders.values():
        for place in places:
            if two := next((at for at in places if at.split == place.split and at.label != place.label), None):
                raise SourceError(f"is of two classes: {two.path} leads to the same folder", path=Path(place.path))
            if place.split == VAL and (of_train := next((at for at in places if at.split == TRAIN), None)):
                shared |= {f"{place.path}/{image}": of_train.path for image in place.images}
    num_val = sum(len(place.images) for places in folders.values() for place in places if place.split == VAL)
    if not shared:
        return
    path, other_path = next(iter(shared.items()))
    are = format_count(len(shared), "image is", "images are")
    said = f"{are} train's too, by links: {path} leads to the same file as one in {other_path}"
    if len(shared) == num_val:
        advice = "val would measure nothing: to pack train alone, name it with --split"
        raise SourceError(f"{said}; {advice}", path=source)
    logger.warning("%s: %s", source, said)


def _real(folder: str, above: str, links: Mapping[str, str]) -> str:
    """Return the real path of a folder, given that of the root, and those that links on its way lead to."""
    real, path = above, ""
    for part in folder.split("/"):
        path = f"{path}/{part}" if path else part
        real = links.get(path) or f"{real}/{part}"
    return real
