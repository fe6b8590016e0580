"""Links among class folders: which folders are of two splits, or of two classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..console import format_count
from ..errors import SourceError
from ..split_names import TRAIN, VAL
from .class_tree import ClassTree

logger = logging.getLogger(__name__)


class _Place(NamedTuple):
    split: str
    label: str
    path: str


def check_links(source: Path, trees: Mapping[str, Sequence[ClassTree]]) -> None:
    """Warn of images that linked folders bring into two splits. Only links are followed; the rest costs no request.

    Args:
        source: Path that the user has given.
        trees: The class folders of each split.

    Raises:
        SourceError: Two classes, or splits, are the same folder, or all images of val are train's.
    """
    roots: dict[str, Path] = {}
    for tree in (tree for joined in trees.values() for tree in joined):
        if (first := roots.setdefault(os.path.realpath(tree.root), tree.root)) != tree.root:
            twice = f"leads to the same folder as {first}: its images would be taken twice"
            raise SourceError(f"{twice}; remove one, or copy it if both are meant", path=tree.root)
    if not any(content.links for joined in trees.values() for tree in joined for content in tree.classes.values()):
        return
    folders: dict[str, list[tuple[_Place, list[str]]]] = {}  # by real path: places that lead to it, and its images
    for split, joined in trees.items():
        for tree in joined:
            above = os.path.realpath(tree.root)
            for label, content in tree.classes.items():
                for folder, images in content.folders:
                    place = _Place(split, label, f"{tree.root}/{folder}")
                    folders.setdefault(_real(folder, above, content.links), []).append((place, images))
    shared: dict[str, str] = {}  # images of val, and the places in train that lead to the same
    for places in folders.values():
        for place, images in places:
            if two := next((at for at, _ in places if at.split == place.split and at.label != place.label), None):
                raise SourceError(f"is of two classes: {two.path} leads to the same folder", path=Path(place.path))
            if place.split == VAL and (of_train := next((at for at, _ in places if at.split == TRAIN), None)):
                shared |= {f"{place.path}/{image}": of_train.path for image in images}
    num_val = sum(len(images) for places in folders.values() for place, images in places if place.split == VAL)
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
