"""The class folders of a split, listed."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from ..console import format_count, format_some
from ..errors import SourceError
from ..fsio import side_by_side
from .class_folders import Doubt, doubt_root
from .file_names import EXTENSIONS, advise, is_harmless, is_hidden, is_image, may_have_labels
from .labels import SAME_LOOK, alike
from .listing import HIDDEN, LeftOut, is_folder
from .paths import follow, is_inside, open_checked, real_path, real_path_of, refused
from .samples import Files

logger = logging.getLogger(__name__)

LAYOUT = "expected class/image.jpg, or train/class/image.jpg and val/class/image.jpg"
_NOT_NAMED = f"not named {', '.join(EXTENSIONS)}"
_MAX_DEPTH = 100  # of folders in a class folder
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RootError(SourceError):
    """A folder is not, or may not be, the one of class folders: `why`, and the doubt, if it is one.

    `as_it_is`: what to type if it is right all the same.
    """

    def __init__(self, why: str, path: Path, doubt: Doubt | None = None, as_it_is: str = "") -> None:
        super().__init__(f"{why}; {LAYOUT}", path=path)
        self.why, self.doubt, self.as_it_is = why, doubt, as_it_is


@dataclass(frozen=True)
class _Class:
    """What lies in and below a class folder."""

    folders: list[tuple[str, list[str]]] = field(default_factory=list)  # path from the root, names of the images
    left_out: dict[str, list[str]] = field(default_factory=dict)  # paths, by reason
    links: dict[str, str] = field(default_factory=dict)  # to folders, and the real paths that they lead to

    @property
    def others(self) -> list[str]:
        """The paths of files that are not images."""
        return self.left_out.get(_NOT_NAMED, [])

    def leave_out(self, path: str, reason: str) -> None:
        """Note what is not taken."""
        self.left_out.setdefault(reason, []).append(path)


@dataclass(frozen=True)
class ClassTree:
    """The class folders of a split, listed.

    `bounds`: links that lead out of this folder are refused; None: links may lead anywhere.
    """

    root: Path
    bounds: str | None
    classes: dict[str, _Class]
    beside: Sequence[str] = ()  # names of files

    @classmethod
    def scan(cls, root: Path, bounds: str | None, left_out: LeftOut) -> ClassTree:
        """Return the class folders in a folder, each listed once.

        A name alone decides what is an image: on filesystems that list no types, to ask takes a request per file.

        Args:
            root: The folder of the class folders.
            bounds: The folder that links must not leave; None: they may lead anywhere.
            left_out: Record to which other entries are added.

        Raises:
            RootError: There are none, or images beside them.
            SourceError: Links lead out of `bounds`.
        """
        with open_checked(str(root), bounds) as fd:
            with refused(str(root)):
                entries = sorted(os.scandir(fd), key=lambda entry: entry.name)
            names = [entry.name for entry in entries if not is_hidden(entry.name)]
            if image := next(filter(is_image, names), None):
                why = "lies beside the class folders, not in one"
                if image.startswith("ILSVRC2012_val_"):
                    why += f"; with ImageNet's devkit or Kaggle's LOC_val_solution.csv in {root.parent}, give that"
                raise RootError(why, root / image)
            listed = side_by_side(lambda name: _list_class(name, fd, root, bounds), names)
            left_out.add_entries(root, HIDDEN, hidden_only=True)
        classes = {name: content for name, content in zip(names, listed, strict=True) if content is not None}
        beside = [name for name in names if name not in classes]
        left_out.add_all((str(root / name) for name in beside), "beside the class folders")
        if not classes:
            raise RootError(f"holds no class folders{advise(names)}", root)
        if pair := alike(classes):
            raise SourceError(f"holds two class folders that {SAME_LOOK}: {pair[0]!a}, {pair[1]!a}", path=root)
        return cls(root, bounds, classes, beside)

    @classmethod
    def merged(cls, source: Path, trees: list[ClassTree]) -> ClassTree:
        """Join trees below a source; class folders of one name become one class."""
        classes: dict[str, _Class] = {}
        for tree in trees:
            above = os.path.relpath(tree.root, source)
            for name, content in tree.classes.items():
                joined = classes.setdefault(name, _Class())
                joined.folders.extend((f"{above}/{folder}", images) for folder, images in content.folders)
                for reason, paths in content.left_out.items():
                    joined.left_out.setdefault(reason, []).extend(f"{above}/{path}" for path in paths)
                joined.links.update((f"{above}/{path}", real) for path, real in content.links.items())
        return cls(source, trees[0].bounds, dict(sorted(classes.items())))

    def names(self) -> list[str]:
        """Return the names of the classes."""
        return list(self.classes)

    def filled(self) -> set[str]:
        """Return the names of the classes that have images."""
        return {name for name, content in self.classes.items() if content.folders}

    def doubt(self, beside: Iterable[str] = (), known: Collection[str] = ()) -> Doubt | None:
        """Doubt that the root is the folder of class folders: see `doubt_root`. `beside`: more files beside it."""
        folders = [(path, len(images)) for content in self.classes.values() for path, images in content.folders]
        inside = (os.path.basename(path) for path in chain(*(content.others for content in self.classes.values())))
        files = (*self.beside, *beside, *(inside if len(folders) == 1 else ()))
        return doubt_root(folders, list(dict.fromkeys(filter(may_have_labels, files))), known)

    def _tell_inner(self) -> None:
        """Warn of folders within class folders that have images of their own: masks and thumbnails lie so, too."""
        inner: Counter[str] = Counter()  # images by the name of their folder
        for content in self.classes.values():
            with_images = {path for path, _ in content.folders}
            for path, images in content.folders:
                if any(str(above) in with_images for above in PurePosixPath(path).parents):
                    inner[os.path.basename(path)] += len(images)
        if inner:
            total = format_count(inner.total(), "image is taken", "images are taken")
            where = f"folders within class folders that have images themselves ({format_some(sorted(inner))})"
            logger.warning("%s: %s from %s", self.root, total, where)

    def samples(self, label_of: Mapping[str, int], left_out: LeftOut) -> Files:
        """Return the samples by class, folder and name. Raises SourceError for a class folder without a label."""
        if unknown := sorted(self.classes.keys() - label_of.keys()):
            message = f"class folders that the train split does not have: {', '.join(unknown[:5])}"
            if pair := alike([*unknown, *label_of]):
                message += f"; {pair[0]!a} and {pair[1]!a} {SAME_LOOK}"
            raise SourceError(message, path=self.root)
        by_label = sorted((label_of[name], content.folders) for name, content in self.classes.items())
        folders = [(label, folder, images) for label, inside in by_label for folder, images in inside]
        files = [image for _, _, images in folders for image in images]
        self._count_others(len(files), left_out)
        self._tell_inner()
        number = np.repeat(np.arange(len(folders), dtype=np.int32), [len(images) for _, _, images in folders])
        labels = np.array([label for label, _, _ in folders], np.uint32)[number]
        return Files(str(self.root), self.bounds, [folder for _, folder, _ in folders], number, files, labels)

    def _count_others(self, num_images: int, left_out: LeftOut) -> None:
        for content in self.classes.values():
            for reason, paths in content.left_out.items():
                left_out.add_all((f"{self.root}/{path}" for path in paths), reason)
        if sum(len(content.others) for content in self.classes.values()) > num_images:
            logger.warning("%s: most of its files are %s: is it the right folder?", self.root, _NOT_NAMED)


def _list_class(name: str, root_fd: int, root: Path, bounds: str | None) -> _Class | None:
    """List a class folder; None if it is not a folder."""
    with refused(str(root / name)):
        real_bounds = bounds and real_path(bounds)
        content = _Class()
        try:
            fd = os.open(name, _LIST_FLAGS, dir_fd=root_fd)
        except NotADirectoryError:  # a file, or a link
            if not os.path.isdir(real_path(name, root_fd)):
                return None
            content.links[name] = follow(name, real_bounds, root_fd)
            fd = os.open(content.links[name], _LIST_FLAGS)
        _list_folder([fd], name, real_bounds, content)
    return content


def _list_folder(fds: list[int], folder: str, real_bounds: str | None, content: _Class) -> None:
    """Add what lies in and below a folder, given open behind those that it lies in, to `content`, and close it.

    Folders below are opened relative to it, which takes one look-up instead of one per part of the path. Links to
    folders are followed, unless they lead to one that they lie in. Raises ValueError if a link leaves the bounds, or
    folders lie too deep: a descriptor of each folder above stays open.
    """
    fd = fds[-1]
    images, folders, links = list[str](), list[str](), list[str]()
    try:
        if len(fds) > _MAX_DEPTH:
            raise ValueError(f"holds folders more than {_MAX_DEPTH} deep")
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                if is_hidden(name):
                    if not is_harmless(name) or entry.is_dir(follow_symlinks=False):
                        content.leave_out(f"{folder}/{name}", HIDDEN)
                elif is_image(name):
                    images.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_symlink() and is_folder(entry):
                    links.append(name)
                else:
                    content.leave_out(f"{folder}/{name}", _NOT_NAMED)
        if images:
            content.folders.append((folder, sorted(images)))
        for name in sorted(folders + links):
            path = f"{folder}/{name}"
            if name in links:
                real = follow(name, real_bounds, fd)
                if any(is_inside(real_path_of(above), real) for above in fds):
                    content.leave_out(path, "a link to a folder that it lies in")
                    continue
                content.links[path] = real
                inside = os.open(real, _LIST_FLAGS)
            else:
                inside = os.open(name, _LIST_FLAGS, dir_fd=fd)
            _list_folder([*fds, inside], path, real_bounds, content)
    finally:
        os.close(fd)
