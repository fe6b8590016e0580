"""ImageFolder: `class/image`, or `train/class/image` and `val/class/image`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import SourceError
from . import SPLITS, Source

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png")
LAYOUT = "expected class/image.jpg, or train/class/image.jpg and val/class/image.jpg"


@dataclass(frozen=True)
class Files:
    """Samples that are files: `root / paths[i]`."""

    root: str
    paths: Sequence[str]
    labels: np.ndarray

    @property
    def names(self) -> list[str]:
        return [path.rsplit(".", 1)[0] for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, i: int) -> str:
        return os.path.join(self.root, self.paths[i])

    def size_bytes(self, i: int) -> int:
        return os.stat(self.where(i)).st_size

    def read(self, i: int) -> bytes:
        with open(self.where(i), "rb", buffering=0) as file:
            return file.read()

    def select(self, which: np.ndarray) -> Files:
        return Files(self.root, [self.paths[i] for i in which], self.labels[which])


def detect(path: Path) -> str:
    return "imagefolder"


def load(path: Path, kind: str) -> Source:
    if not path.is_dir():
        raise SourceError(f"is no folder, and no archive that datapipe knows; {LAYOUT}", path=path)
    roots = _split_roots(path)
    classes = _class_names(roots["train"] if "train" in roots else next(iter(roots.values())))
    splits = {split: _list(root, classes) for split, root in roots.items()}
    return Source(kind, classes, splits)


def _split_roots(path: Path) -> dict[str, Path]:
    """Where each split's class folders lie."""
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise SourceError(f"holds no class folders; {LAYOUT}", path=path)
    splits = [name for name in names if name in SPLITS]
    if len(splits) < len(names):
        # A class may be called "train", too; but then it holds images, not classes.
        if not any(entry.is_dir() for name in splits for entry in os.scandir(path / name)):
            return {"train": path}
        others = ", ".join(name for name in names if name not in SPLITS)
        raise SourceError(f"holds {', '.join(splits)} beside {others}; {LAYOUT}", path=path)
    roots: dict[str, Path] = {}
    for name in sorted(splits, key=lambda name: (SPLITS[name], name == "test", name)):
        if SPLITS[name] in roots:
            logger.warning("%s: left out, %s is taken as the val split", path / name, roots["val"].name)
        else:
            roots[SPLITS[name]] = path / name
    return roots


def _class_names(root: Path) -> list[str]:
    classes = []
    for entry in os.scandir(root):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            classes.append(entry.name)
        elif entry.name.lower().endswith(EXTENSIONS):
            raise SourceError(f"lies beside the class folders, not in one; {LAYOUT}", path=entry.path)
    if not classes:
        raise SourceError(f"holds no class folders; {LAYOUT}", path=root)
    return sorted(classes)


def _list(root: Path, classes: list[str]) -> Files:
    unknown = sorted(set(_class_names(root)) - set(classes))
    if unknown:
        raise SourceError(f"class folders that the train split does not have: {', '.join(unknown[:5])}", path=root)
    paths: list[str] = []
    counts = []
    skipped: list[str] = []
    for name in classes:
        found = sorted(_walk(str(root), name, skipped)) if (root / name).exists() else []
        if not found:
            logger.warning("%s: no images of class %s", root, name)
        paths += found
        counts.append(len(found))
    if skipped:
        logger.warning(
            "%s: left out %d files that are not named %s, the first: %s",
            root, len(skipped), ", ".join(EXTENSIONS), skipped[0],
        )  # fmt: skip
    return Files(str(root), paths, np.repeat(np.arange(len(classes), dtype=np.uint32), counts))


def _walk(root: str, folder: str, skipped: list[str]) -> Iterator[str]:
    """Paths of images below `root/folder`, relative to `root`.

    A class folder may be a link, and so may a file; links to folders below are not followed (they may loop).
    """
    for entry in os.scandir(os.path.join(root, folder)):
        path = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, path, skipped)
        elif entry.name.lower().endswith(EXTENSIONS) and (entry.is_symlink() or entry.is_file()):
            yield path
        else:
            skipped.append(path)
