"""ImageFolder: `class/image`, or `train/class/image` and `val/class/image`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
        raise SourceError(f"is no folder, and no archive that datapipe knows; {LAYOUT}", path=path)
    bounds = None if outside else str(path)
    trees = {split: ClassTree.scan(root, bounds) for split, root in _split_roots(path).items()}
    classes = (trees["train"] if "train" in trees else next(iter(trees.values()))).names()
    return Source(kind, classes, {split: tree.samples(classes) for split, tree in trees.items()})


def _split_roots(path: Path) -> dict[str, Path]:
    """Where each split's class folders lie."""
    entries = [entry for entry in os.scandir(path) if not is_hidden(entry.name) and not is_image(entry.name)]
    if not entries:
        raise SourceError(f"holds no class folders; {LAYOUT}", path=path)
    splits = [entry.name for entry in entries if entry.name in SPLITS and entry.is_dir()]
    others = sorted(entry.name for entry in entries if splits and entry.name not in splits and entry.is_dir())
    if not splits:
        return {"train": path}
    if others:
        # A class may be called "train", too; but then it holds images, not classes.
        if not any(_holds_folders(path / name) for name in splits):
            return {"train": path}
        raise SourceError(f"holds {', '.join(sorted(splits))} beside {', '.join(others)}; {LAYOUT}", path=path)
    return {split: path / name for split, name in pick_splits(path, splits).items()}


def _holds_folders(path: Path) -> bool:
    return any(not is_image(entry.name) and entry.is_dir() for entry in os.scandir(path))


@dataclass(frozen=True)
class _Class:
    """What lies in a class folder and below."""

    folders: list[tuple[str, list[str]]] = field(default_factory=list)  # folder's path from the root, its images' names
    others: list[str] = field(default_factory=list)  # paths of files that are no images


@dataclass(frozen=True)
class ClassTree:
    """The class folders of a split, listed. `bounds`: the folder that no link leads out of; None: links may."""

    root: Path
    bounds: str | None
    classes: dict[str, _Class]

    @classmethod
    def scan(cls, root: Path, bounds: str | None) -> ClassTree:
        """List each folder once. What is named as an image is taken for one: where the filesystem gives no types
        with the names, asking costs a request for each. Raises SourceError, for links that lead out of `bounds`, too.
        """
        with opened(str(root), bounds) as fd:
            with refused(str(root)):
                names = sorted(entry.name for entry in os.scandir(fd) if not is_hidden(entry.name))
            if image := next(filter(is_image, names), None):
                raise SourceError(f"lies beside the class folders, not in one; {LAYOUT}", path=root / image)
            found = side_by_side(lambda name: _list_class(name, fd, root, bounds), names)
        classes = {name: of for name, of in zip(names, found, strict=True) if of is not None}
        if not classes:
            raise SourceError(f"holds no class folders; {LAYOUT}", path=root)
        return cls(root, bounds, classes)

    def names(self) -> list[str]:
        return list(self.classes)

    def samples(self, classes: list[str]) -> Files:
        """By class, then by folder, then by name. Raises SourceError for a class that is none of `classes`."""
        unknown = sorted(self.classes.keys() - set(classes))
        if unknown:
            message = f"class folders that the train split does not have: {', '.join(unknown[:5])}"
            raise SourceError(message, path=self.root)
        folders: list[str] = []
        files: list[str] = []
        labels: list[int] = []  # of each folder
        counts: list[int] = []
        for label, name in enumerate(classes):
            of = self.classes.get(name, _Class()).folders
            if not any(images for _, images in of):
                logger.warning("%s: no images of class %s", self.root, name)
            for folder, images in of:
                folders.append(folder)
                labels.append(label)
                counts.append(len(images))
                files += images
        self._warn_of_others()
        number = np.repeat(np.arange(len(folders), dtype=np.int32), counts)
        return Files(str(self.root), self.bounds, folders, number, files, np.array(labels, np.uint32)[number])

    def _warn_of_others(self) -> None:
        others = [path for of in self.classes.values() for path in of.others]
        if others:
            logger.warning(
                "%s: left out %d files that are not named %s, the first: %s",
                self.root, len(others), ", ".join(EXTENSIONS), others[0],
            )  # fmt: skip


def _list_class(name: str, root_fd: int, root: Path, bounds: str | None) -> _Class | None:
    """None for what is no folder."""
    with refused(str(root / name)):
        try:
            fd = os.open(name, LIST_FLAGS, dir_fd=root_fd)
        except NotADirectoryError:  # a file, or a link
            if not os.path.isdir(real_path(name, root_fd)):
                return None
            fd = os.open(follow(name, bounds and real_path(bounds), root_fd), LIST_FLAGS)
        found = _Class()
        _walk(fd, name, found)
    return found


def _walk(fd: int, folder: str, found: _Class) -> None:
    """List a folder, given open, and close it. Relative to it the folders below are opened: one look-up, not a path's.

    A class folder may be a link, and so may a file; links to folders below are not followed (they may loop). Raises
    ValueError for folders that lie too deep: a descriptor of each above stays open.
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
                    found.others.append(f"{folder}/{name}")
        if images:
            found.folders.append((folder, sorted(images)))
        for name in sorted(folders):
            _walk(os.open(name, LIST_FLAGS, dir_fd=fd), f"{folder}/{name}", found)
    finally:
        os.close(fd)
