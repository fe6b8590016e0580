"""The paths of samples in tables and archives, and what they say of splits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..splits import SPLIT_OF, is_split_name, split_words

SPOKEN = ("train", "trn", "val", "dev", "test", "tst", "hold", "held", "t10k")  # each word of splits has one of them
MAX_PATTERNS = 1000  # of files' names: more are not called by a rule

Names = tuple[list[str], np.ndarray]  # distinct names, and int[N], the number of each sample's


class Paths(NamedTuple):
    """The samples' paths in a table or an archive."""

    folders: Sequence[str]
    folder: np.ndarray  # integers[N]: the number of each sample's folder
    files: Sequence[str]

    @classmethod
    def from_texts(cls, paths: Iterable[str]) -> Paths:
        """Divide paths into folders and files."""
        folders: dict[str, int] = {}
        pairs = [os.path.split(path) for path in paths]
        numbers = [folders.setdefault(folder, len(folders)) for folder, _ in pairs]
        return cls(list(folders), np.array(numbers, np.int32), [file for _, file in pairs])

    def joined(self) -> list[str]:
        """List the paths."""
        pairs = zip(self.folder.tolist(), self.files, strict=True)
        return [os.path.join(self.folders[folder], file) for folder, file in pairs]


def may_speak(texts: Sequence[Sequence[str]]) -> bool:
    return any(word in text for text in ("\n".join(names).lower() for names in texts) for word in SPOKEN)


def by_folder(paths: Paths, labels: Sequence[str]) -> Names | None:
    """Name samples by those folders in their paths that speak of splits; None: none does.

    A folder whose name says more, such as `bullet_train`, or the same as a label, may be that of one class: it speaks
    only if several classes lie in it.
    """
    speaking = [number for number, folder in enumerate(paths.folders) if split_words(folder)]
    if not speaking:
        return None
    below: dict[str, set[str]] = {}  # the labels below each folder
    for i in np.flatnonzero(np.isin(paths.folder, speaking)).tolist():
        below.setdefault(paths.folders[paths.folder[i]], set()).add(labels[i])
    for folder, inside in list(below.items()):
        while folder := os.path.dirname(folder).rstrip("/"):
            below.setdefault(folder, set()).update(inside)
    spoken = {number: "/".join(_spoken(paths.folders[number], below)) for number in speaking}
    if not any(spoken.values()):
        return None
    _, first = np.unique(paths.folder, return_index=True)
    names = [
        spoken.get(number) or folder or paths.files[at]
        for (number, folder), at in zip(enumerate(paths.folders), first.tolist(), strict=True)
    ]
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return list(distinct), np.array([distinct[name] for name in names], np.int32)[paths.folder]


def _spoken(folder: str, below: Mapping[str, set[str]]) -> Iterator[str]:
    parts = folder.split("/")
    for at, part in enumerate(parts):
        inside = below.get("/".join(parts[: at + 1]), set())
        if split_words(part) and (len(inside) > 1 or "" in inside or (is_split_name(part) and inside != {part})):
            yield part


def by_file_name(paths: Paths) -> Names | None:
    """Name samples by their files' names, without numbers, if those speak of several splits."""
    if not may_speak([paths.files]):
        return None
    bare = re.sub("[0-9]+", "", "\n".join(paths.files)).split("\n")
    distinct = {name: number for number, name in enumerate(dict.fromkeys(bare))}
    if len(distinct) > MAX_PATTERNS or len(bare) != len(paths.files):
        return None
    pure = {SPLIT_OF[word] for name in distinct if is_split_name(name) for word in split_words(name)}
    words = [split_words(name) for name in distinct]
    if len(pure) < 2 and not (all(words) and len({SPLIT_OF[word] for of_name in words for word in of_name}) > 1):
        return None
    return list(distinct), np.array([distinct[name] for name in bare], np.int32)
