"""ImageFolder: `class/image`, or `train/class/image` and `val/class/image`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..console import format_count
from ..errors import SourceError
from ..fsio import side_by_side
from . import SPLITS, Source
from .files import Files
from .paths import follow, opened, real_path, refused
from .splits import EXTENSIONS, is_hidden, is_image, pick_splits

logger = logging.getLogger(__name__)

LAYOUT = "expected class/image.jpg, or train/class/image.jpg and val/class/image.jpg"
MAX_DEPTH = 100  # of folders in a class folder
LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def detect(path: Path) -> str:
    return "imagefolder"


def load(path: Path, kind: str, outside: bool) -> Source:
    if not path.is_dir():
        raise SourceError(f"is not a folder, and not an archive that datapipe knows; {LAYOUT}", path=path)
    bounds = None if outside else str(path)
    trees = {split: ClassTree.scan(root, bounds) for split, root in _split_roots(path).items()}
    classes = (trees["train"] if "train" in trees else next(iter(trees.values()))).names()
    return Source(kind, classes, {split: tree.samples(classes) for split, tree in trees.items()})


def _split_roots(path: Path) -> dict[str, Path]:
    """Find the folder that holds each split's class folders."""
    entries = [entry for entry in os.scandir(path) if not is_hidden(entry.name) and not is_image(entry.name)]
    if not entries:
        raise SourceError(f"holds no class folders; {LAYOUT}", path=path)
    splits = [entry.name for entry in entries if entry.name in SPLITS and entry.is_dir()]
    others = sorted(entry.name for entry in entries if splits and entry.name not in splits and entry.is_dir())
    if not splits:
        return {"train": path}
    if others:
        # A class may also be called "train"; then it holds images, not classes.
        if not any(_holds_folders(path / name) for name in splits):
            return {"train": path}
        raise SourceError(f"holds {', '.join(sorted(splits))} beside {', '.join(others)}; {LAYOUT}", path=path)
    return {split: path / name for split, name in pick_splits(path, splits).items()}


def _holds_folders(path: Path) -> bool:
    with os.scandir(path) as entries:
        return any(not is_image(entry.name) and entry.is_dir() for entry in entries)


@dataclass(frozen=True)
class _Class:
    """What lies in and below a class folder."""

    folders: list[tuple[str, list[str]]] = field(default_factory=list)  # path from the root, names of the images
    others: list[str] = field(default_factory=list)  # paths of files that are not images


@dataclass(frozen=True)
class ClassTree:
    """The class folders of a split, listed.

    `bounds`: links that lead out of this folder are refused; None: links may lead anywhere.
    """

    root: Path
    bounds: str | None
    classes: dict[str, _Class]

    @classmethod
    def scan(cls, root: Path, bounds: str | None) -> ClassTree:
        """List each folder once. Raises SourceError, also for links that lead out of `bounds`.

        A name alone decides what is an image: on filesystems that list no types, to ask takes a request per file.
        """
        with opened(str(root), bounds) as fd:
            with refused(str(root)):
                names = sorted(entry.name for entry in os.scandir(fd) if not is_hidden(entry.name))
            if image := next(filter(is_image, names), None):
                raise SourceError(f"lies beside the class folders, not in one; {LAYOUT}", path=root / image)
            listed = side_by_side(lambda name: _list_class(name, fd, root, bounds), names)
        classes = {name: content for name, content in zip(names, listed, strict=True) if content is not None}
        if not classes:
            raise SourceError(f"holds no class folders; {LAYOUT}", path=root)
        return cls(root, bounds, classes)

    def names(self) -> list[str]:
        """Return the names of the classes."""
        return list(self.classes)

    def samples(self, classes: list[str]) -> Files:
        """Return the samples by class, folder and name. Raises SourceError for a class that is not in `classes`."""
        unknown = sorted(self.classes.keys() - set(classes))
        if unknown:
            message = f"class folders that the train split does not have: {', '.join(unknown[:5])}"
            raise SourceError(message, path=self.root)
        folders: list[str] = []
        files: list[str] = []
        labels: list[int] = []  # of each folder
        counts: list[int] = []
        for label, name in enumerate(classes):
            of_class = self.classes.get(name, _Class()).folders
            if not any(images for _, images in of_class):
                logger.warning("%s: no images of class %s", self.root, name)
            for folder, images in of_class:
                folders.append(folder)
                labels.append(label)
                counts.append(len(images))
                files += images
        self._warn_of_others(len(files))
        number = np.repeat(np.arange(len(folders), dtype=np.int32), counts)
        return Files(str(self.root), self.bounds, folders, number, files, np.array(labels, np.uint32)[number])

    def _warn_of_others(self, num_images: int) -> None:
        others = [path for content in self.classes.values() for path in content.others]
        if others:
            logger.warning(
                "%s: left out %s not named %s, the first: %s%s",
                self.root, format_count(len(others), "file"), ", ".join(EXTENSIONS), others[0],
                "; these are most of its files: is it the right folder?" if len(others) > num_images else "",
            )  # fmt: skip


def _list_class(name: str, root_fd: int, root: Path, bounds: str | None) -> _Class | None:
    """List a class folder; None if it is not a folder."""
    with refused(str(root / name)):
        try:
            fd = os.open(name, LIST_FLAGS, dir_fd=root_fd)
        except NotADirectoryError:  # a file, or a link
            if not os.path.isdir(real_path(name, root_fd)):
                return None
            fd = os.open(follow(name, bounds and real_path(bounds), root_fd), LIST_FLAGS)
        content = _Class()
        _list_folder(fd, name, content)
    return content


def _list_folder(fd: int, folder: str, content: _Class) -> None:
    """Add what lies in and below a folder, given open, to `content`, and close it.

    Folders below are opened relative to it, which takes one look-up instead of one per part of the path. A class folder
    may be a link, and so may a file; links to folders below are not followed, as they may form a circle. Raises
    ValueError for folders that lie too deep, since a descriptor of each folder above stays open.
    """
    images, folders = [], []
    try:
        if folder.count("/") > MAX_DEPTH:
            raise ValueError(f"holds folders more than {MAX_DEPTH} deep")
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                if is_hidden(name):
                    continue
                if is_image(name):
                    images.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                else:
                    content.others.append(f"{folder}/{name}")
        if images:
            content.folders.append((folder, sorted(images)))
        for name in sorted(folders):
            _list_folder(os.open(name, LIST_FLAGS, dir_fd=fd), f"{folder}/{name}", content)
    finally:
        os.close(fd)
