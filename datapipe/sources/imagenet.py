"""ImageNet (ILSVRC2012) as it is distributed, read without unpacking it.

    ILSVRC2012_img_train.tar        a tar of 1,000 class tars, n01440764.tar with n01440764_10026.JPEG and so on
    ILSVRC2012_img_val.tar          ILSVRC2012_val_00000001.JPEG to …50000.JPEG
    ILSVRC2012_devkit_t12.tar.gz    (or unpacked) the labels of the val images

Class tars may also lie in train/, and the val images, unpacked, in val/. What is unpacked into class folders (train/,
val/) is read as an ImageFolder. Kaggle's archive has train/ and val/ in ILSVRC/Data/CLS-LOC, and the labels of the val
images in LOC_val_solution.csv. Classes are the synsets (WordNet ids) in their order, as everywhere in the field.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import SourceError, WrongPathError
from ..formats.tar_listing import Member, list_members
from ..split_names import SPLIT_OF, is_split_name, split_words
from . import Samples, Source
from .class_tree import ClassTree
from .file_names import CLASS_TAR, IMAGENET_TRAIN, is_hidden, is_image, is_in_hidden
from .imagenet_labels import DEVKITS, LABEL_FILES, SOLUTION, TRAIN_SOLUTION, ValLabels, read_labels
from .listing import HIDDEN, LeftOut, Listing, list_at_once
from .paths import open_checked
from .roots import check_roots
from .samples import ArchiveMembers, Files, join_archives

_VAL = "ILSVRC2012_img_val.tar"
_VAL_PREFIX = "ILSVRC2012_val_"
_VAL_NAME = re.compile(_VAL_PREFIX + r"(\d{8})\.(?i:jpe?g|png)")
_OWN = "ILSVRC", "LOC_"  # what begins the names of all that belongs to ImageNet
_KAGGLE = Path("ILSVRC/Data/CLS-LOC")
_LOOKED_AT = 8  # entries of val/, to see what they are


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return "imagenet" if path.name in (IMAGENET_TRAIN, _VAL) else None
    names = set(os.listdir(path))
    if names & {IMAGENET_TRAIN, _VAL} or (SOLUTION in names and (path / _KAGGLE).is_dir()):
        return "imagenet"
    is_ours = ("train" in names and _class_tars(path / "train")) or ("val" in names and _is_flat(path / "val"))
    return "imagenet" if is_ours else None


def _is_flat(folder: Path) -> bool:
    """Whether a folder begins with val images themselves, as filesystems list it: not in class folders."""
    try:
        with os.scandir(folder) as entries:
            return any(_VAL_NAME.fullmatch(entry.name) for entry, _ in zip(entries, range(_LOOKED_AT), strict=False))
    except NotADirectoryError:
        return False


def load(path: Path, kind: str, listing: Listing) -> Source:
    if not path.is_dir():
        raise WrongPathError("is not a folder; give the one that holds the archives of ImageNet", path=path)
    listing.refuse_options(kind)
    bounds, root = listing.bounds(path), path
    if (path / _KAGGLE).is_dir():
        path = path / _KAGGLE
    names = set(os.listdir(path))
    _check_names(path, names, listing.left_out)
    is_flat = "val" in names and _is_flat(path / "val")
    known = read_labels(root, path, bounds) if _VAL in names or is_flat else None  # at first: it may need a package
    if known is None and (is_flat or (_VAL in names and "val" not in names)):
        raise SourceError(f"holds {'val images' if is_flat else _VAL} without its labels{_advice(path)}", path=path)
    for folder in {root, path}:
        own = {n for n in os.listdir(folder) if not is_hidden(n) and (split_words(n) or n.startswith(_OWN))}
        listing.left_out.add_entries(folder, "beside the files of ImageNet", own)
    splits: dict[str, Samples] = {}
    classes, train = _train(path, bounds, listing.left_out)
    if train is not None:
        splits["train"] = train
    if known is not None:
        place = path / (_VAL if _VAL in names else "val")
        classes, splits["val"] = _val(place, known, classes, bounds, listing.left_out)
    elif "val" in names:
        tree = ClassTree.scan(path / "val", bounds, listing.left_out)
        check_roots(path, {"val": [tree]})
        classes = classes or tree.names()
        splits["val"] = tree.samples({name: label for label, name in enumerate(classes)}, listing.left_out)
    if not splits:
        raise SourceError(f"holds neither {IMAGENET_TRAIN} nor {_VAL}, nor train/ or val/", path=path)
    return Source(kind, classes, splits)


def _advice(path: Path) -> str:
    """Say where the labels of val images may come from."""
    above = next((folder for folder in path.absolute().parents if (folder / SOLUTION).exists()), None)
    if above is not None and path.absolute() == above / _KAGGLE:
        return f": give {above}, which has them in {SOLUTION}"
    return f": {LABEL_FILES} is missing; put it there"


def _check_names(path: Path, names: set[str], left_out: LeftOut) -> None:
    """Count what is called as a split and is not read. Raises SourceError if it may be a split that is meant."""
    for name in sorted(names - {IMAGENET_TRAIN, _VAL, "train", "val", *DEVKITS, SOLUTION, TRAIN_SOLUTION}):
        if is_hidden(name) or not split_words(name):
            continue
        if is_split_name(name) and SPLIT_OF[split_words(name)[-1]] != "test" and (path / name).is_dir():
            raise SourceError(
                f"is not read: ImageNet's folders are called train and val; rename {name}", path=path / name
            )
        left_out.add(str(path / name), "called as a split, and not ImageNet's name for it")
    for folder, archive in (("train", IMAGENET_TRAIN), ("val", _VAL)):
        if {folder, archive} <= names:
            left_out.add(str(path / folder), f"beside {archive}, which is read instead")


def _class_tars(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if CLASS_TAR.fullmatch(entry.name))
    except NotADirectoryError:
        return []


# --- train ------------------------------------------------------------------------------------------


class _ClassTar(NamedTuple):
    """The archive of a class, which is a file or a member of one."""

    wnid: str
    path: str
    begin: int = 0
    end: int | None = None  # None: where the file ends


def _train(path: Path, bounds: str | None, left_out: LeftOut) -> tuple[list[str], Samples | None]:
    """List the train split: the classes, and the samples; None if there is no such split."""
    folder = path / "train"
    if (path / IMAGENET_TRAIN).exists():
        tars = _classes_in(str(path / IMAGENET_TRAIN), bounds, left_out)
    elif names := _class_tars(folder) if folder.is_dir() else []:
        tars = [_ClassTar(name.removesuffix(".tar"), str(folder / name)) for name in names]
        for name in sorted(set(os.listdir(folder)) - set(names)):
            left_out.add(str(folder / name), "beside the class tars")
    elif folder.is_dir():
        tree = ClassTree.scan(folder, bounds, left_out)
        check_roots(path, {"train": [tree]})
        return tree.names(), tree.samples({name: label for label, name in enumerate(tree.names())}, left_out)
    else:
        return [], None
    return [tar.wnid for tar in tars], _images_in(tars, bounds, left_out)


def _classes_in(path: str, bounds: str | None, left_out: LeftOut) -> list[_ClassTar]:
    """List the class tars in the train archive, by class."""
    with open_checked(path, bounds) as fd:
        archive = list_members(fd, path)
    tars: dict[str, _ClassTar] = {}
    for member in archive.members:
        if not (match := CLASS_TAR.fullmatch(_name(member.name))):
            left_out.add(f"{path}: {member.name}", "not named as a class's tar")
            continue
        if match[1] in tars:
            raise SourceError(f"holds {match[0]} twice", path=path)
        tars[match[1]] = _ClassTar(match[1], path, member.offset, member.offset + member.size)
    if not tars:
        raise SourceError("holds no class tars, such as n01440764.tar", path=path)
    left_out.add_members(path, archive.others)
    return [tars[wnid] for wnid in sorted(tars)]


def _images_in(tars: list[_ClassTar], bounds: str | None, left_out: LeftOut) -> ArchiveMembers:
    """List the images of all class tars, each in its class."""

    def list_class(tar: _ClassTar) -> ArchiveMembers:
        where = f"{tar.path}: {tar.wnid}.tar"
        with open_checked(tar.path, bounds) as fd:
            archive = list_members(fd, where, tar.begin, tar.end)
        left_out.add_members(where, archive.others)
        images = [member for member in archive.members if is_image(member.name) and not is_in_hidden(member.name)]
        for member in set(archive.members) - set(images):
            left_out.add(f"{where}: {member.name}", "not an image")
        return ArchiveMembers.of_archive(tar.path, [f"{tar.wnid}/{_stem(member.name)}" for member in images], images)

    listed = list_at_once(list_class, tars)
    return join_archives(listed, np.repeat(np.arange(len(tars), dtype=np.uint32), list(map(len, listed))))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    return _name(path).rsplit(".", 1)[0]


# --- val --------------------------------------------------------------------------------------------


def _val(
    path: Path, known: ValLabels, classes: list[str], bounds: str | None, left_out: LeftOut
) -> tuple[list[str], Samples]:
    """Return the classes (without a train split, those of the labels), and the val images of an archive or a folder.

    Raises SourceError where an image has no label, or the train split not its class.
    """
    members = [] if path.is_dir() else _in_archive(path, bounds, left_out)
    files = _in_folder(path, bounds, left_out) if path.is_dir() else [_name(member.name) for member in members]
    numbers = [int(match[1]) for name in files if (match := _VAL_NAME.fullmatch(name))]
    if lacking := sorted(set(numbers) - known.wnids.keys()):
        what = f"has labels for {len(known.wnids)} images, and none for number {lacking[0]}"
        raise SourceError(f"does not fit {known.where}, which {what}", path=path)
    if absent := sorted(known.wnids.keys() - set(numbers)):
        images = (f"{known.where}: {_VAL_PREFIX}{number:08d}" for number in absent)
        left_out.add_all(images, "labels of val images that are not there")
    wnids = [known.wnids[number] for number in numbers]
    classes = classes or known.classes
    if unknown := sorted(set(wnids) - set(classes)):
        raise SourceError(f"classes that the train split does not have: {', '.join(unknown[:5])}", path=path)
    numbers_by_wnid = {wnid: label for label, wnid in enumerate(classes)}
    labels = np.array([numbers_by_wnid[wnid] for wnid in wnids], np.uint32)
    if not members:
        return classes, Files(str(path), bounds, [""], np.zeros(len(files), np.int32), files, labels)
    names = [f"{wnid}/{_stem(name)}" for wnid, name in zip(wnids, files, strict=True)]
    return classes, join_archives([ArchiveMembers.of_archive(str(path), names, members)], labels)


def _in_archive(path: Path, bounds: str | None, left_out: LeftOut) -> list[Member]:
    """List the val images in their archive."""
    with open_checked(str(path), bounds) as fd:
        archive = list_members(fd, str(path))
    named = (member for member in archive.members if not is_in_hidden(member.name))
    images = [member for member in named if _VAL_NAME.fullmatch(_name(member.name))]
    left_out.add_members(str(path), archive.others)
    for member in set(archive.members) - set(images):
        left_out.add(f"{path}: {member.name}", "not named as a val image")
    return images


def _in_folder(folder: Path, bounds: str | None, left_out: LeftOut) -> list[str]:
    """List the val images in a folder, which are not sorted by class. Raises SourceError where some are."""
    names: list[str] = []
    with open_checked(str(folder), bounds) as fd, os.scandir(fd) as entries:
        for entry in entries:
            if _VAL_NAME.fullmatch(entry.name):
                names.append(entry.name)
            elif not is_hidden(entry.name) and entry.is_dir():
                raise SourceError(
                    f"holds images beside folders, such as {entry.name}: sort all of them into class folders, or none",
                    path=folder,
                )
            else:
                left_out.add(str(folder / entry.name), HIDDEN if entry.is_dir() else "not named as a val image")
    return sorted(names)
