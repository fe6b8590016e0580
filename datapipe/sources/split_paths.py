"""The paths of samples in tables and archives, and what they say of splits."""

from __future__ import annotations

import glob
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..console import format_count, format_some
from ..split_names import (
    FOLD,
    HASH,
    TEST,
    TRAIN,
    VAL,
    is_split_name,
    mean_splits,
    named_options,
    options_of,
    pure_splits,
    short_splits,
    split_words,
    splits_of,
)
from ..splits import AmbiguousSplitError, Typed
from .shard_names import check_folds

logger = logging.getLogger(__name__)

_SPOKEN = ("train", "trn", "val", "dev", "test", "tst", "hold", "held", "t10k")  # each word of splits has one of them
_MAX_PATTERNS = 1000  # of files' names: more are not called by a rule


class Names(NamedTuple):
    """What samples are divided by.

    Attributes:
        names: Distinct names.
        number: Number of each sample's name, integers[N].
        typed: Function that gives the texts by which `--split` names the samples of a name.
    """

    names: list[str]
    number: np.ndarray
    typed: Typed = lambda name: [name]

    @classmethod
    def from_texts(cls, texts: Iterable[str], typed: Typed = lambda name: [name]) -> Names:
        """Number the distinct ones of some texts, in their order."""
        numbers: dict[str, int] = {}
        number = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
        return cls(list(numbers), number, typed)


class Paths(NamedTuple):
    """The samples' paths in a table or an archive."""

    folders: Sequence[str]
    folder: np.ndarray  # integers[N]: the number of each sample's folder
    files: Sequence[str]

    @classmethod
    def from_texts(cls, paths: Iterable[str]) -> Paths:
        """Divide paths into folders and files."""
        pairs = [os.path.split(path) for path in paths]
        folders = Names.from_texts(folder for folder, _ in pairs)
        return cls(folders.names, folders.number, [file for _, file in pairs])

    def joined(self) -> list[str]:
        """List the paths."""
        pairs = zip(self.folder.tolist(), self.files, strict=True)
        return [os.path.join(self.folders[folder], file) for folder, file in pairs]


def may_speak(texts: Sequence[Sequence[str]]) -> bool:
    return any(word in text for text in ("\n".join(names).lower() for names in texts) for word in _SPOKEN)


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
    spoken: dict[int, str] = {}
    places: dict[str, dict[str, None]] = {}  # by name: the folders that are called so, with those above them
    for number in speaking:
        parts = paths.folders[number].split("/")
        at = _spoken(parts, below)
        if at:
            spoken[number] = "/".join(parts[i] for i in at)
            place = os.path.normpath("/".join(parts[: at[-1] + 1]))
            places.setdefault(spoken[number], {})[place] = None
    if not spoken:
        return None
    _, first = np.unique(paths.folder, return_index=True)
    names = (
        spoken.get(number) or folder or paths.files[at]
        for (number, folder), at in zip(enumerate(paths.folders), first.tolist(), strict=True)
    )
    of_folders = Names.from_texts(names, lambda name: [*places.get(name, {name: None})])
    return of_folders._replace(number=of_folders.number[paths.folder])


def _spoken(parts: Sequence[str], below: Mapping[str, set[str]]) -> list[int]:
    """List which parts of a folder's path speak of splits."""
    spoken = []
    for at, part in enumerate(parts):
        inside = below.get("/".join(parts[: at + 1]), set())
        if split_words(part) and (len(inside) > 1 or "" in inside or (is_split_name(part) and inside != {part})):
            spoken.append(at)
    return spoken


def by_file_name(paths: Paths) -> Names | None:
    """Name samples by their files' names, without numbers, if those speak of several splits."""
    if not may_speak([paths.files]):
        return None
    bare = re.sub("[0-9]+", "", "\n".join(paths.files)).split("\n")

    def files_of(name: str) -> list[str]:
        return list(dict.fromkeys(itertools.compress(paths.files, map(name.__eq__, bare))))

    by_name = Names.from_texts(bare, files_of)
    if len(by_name.names) > _MAX_PATTERNS or len(bare) != len(paths.files):
        return None
    splits = [splits_of(name) for name in by_name.names]
    are_several = len(pure_splits(by_name.names)) > 1 or (all(splits) and len(set().union(*splits)) > 1)
    return by_name if are_several else None


def check_paths(
    chosen: Names,
    said: Mapping[str, str],
    paths: Names,
    all_paths: Callable[[], Paths],
    source: Path,
) -> None:
    """Raise SourceError where samples of train lie in a folder of another split; warn of other contradictions.

    Args:
        chosen: The names that the samples are divided by.
        said: The split of each of these.
        paths: The names that their paths give them.
        all_paths: Function that gives the paths.
        source: The data set, for messages.
    """
    names, number, typed = chosen
    spoken = [splits_of(name) for name in paths.names]
    pairs = number.astype(np.int64) * len(spoken) + paths.number
    distinct, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    for pair, i, count in zip(distinct.tolist(), first.tolist(), counts.tolist(), strict=True):
        at, place = divmod(pair, len(spoken))
        name = names[at]
        split = said.get(name)
        if split is None or len(spoken[place]) != 1 or split in spoken[place]:
            continue
        what = f"{format_count(count, 'sample')} of {name} {'lies' if count == 1 else 'lie'} in {paths.names[place]}"
        example = all_paths().joined()[i]
        if split == TRAIN:
            of_names = {text: said[name] for name in said for text in typed(name)}
            by_path = zip(paths.names, spoken, strict=True)
            of_paths = {text: next(iter(its)) for name, its in by_path if its for text in paths.typed(name)}
            raise AmbiguousSplitError(
                source,
                f"{what}, such as {example}, so it is not clear whether they are for training",
                f"if they are, type {options_of(of_names)}; if the folders are right, type {options_of(of_paths)}",
            )
        if len(set().union(*spoken)) > 1:
            logger.warning("%s: %s, such as %s: taken as what %s says", source, what, example, name)


def check_undivided(files: Sequence[str], paths: Paths, labels: Collection[str], source: Path) -> None:
    """Raise AmbiguousSplitError if all files, or folders or files in paths, are called `tr` or `va`, say, or as folds.

    It is logged that files of several names are all for training.

    Args:
        files: The tars or tables, by their paths below the source.
        paths: The samples' paths in them.
        labels: The samples' labels: a folder called so is a class.
        source: The data set, for messages.
    """
    folds = _first_parts(paths.folders, FOLD.search)
    if {os.path.basename(name) for name in folds}.isdisjoint(labels):
        check_folds(folds, source)
    short = _first_parts(paths.folders, short_splits), _first_parts(paths.files, short_splits)
    for names in (files, *short):
        if mean_splits(names) and {os.path.basename(name) for name in names}.isdisjoint(labels):
            groups: dict[str, list[str]] = {TRAIN: [], VAL: [], TEST: []}
            for pattern in _patterns(names):
                groups[min(short_splits(pattern))].append(pattern)
            options = named_options({TRAIN: groups[TRAIN], VAL: groups[VAL] or groups[TEST]})
            why = f"{format_some(list(names))} may be called as splits"
            advice = f"type {options} if they are, or --split train=. if all are for training"
            raise AmbiguousSplitError(source, why, advice)
    if len(patterns := _patterns(files)) > 1:
        logger.info("%s: %s are all for training, since none is called as a split", source, format_some(patterns))


def _patterns(names: Iterable[str]) -> list[str]:
    """Return patterns of names that differ in more than their numbers."""
    return list(dict.fromkeys(re.sub("[0-9]+", "*", HASH.sub("0", glob.escape(name))) for name in names))


def _first_parts(paths: Iterable[str], is_meant: Callable[[str], object]) -> list[str]:
    """List the first part of each path, with those above it, that is meant; [] if a path has none.

    >>> _first_parts(["photos/tr/cat", "photos/tr/dog", "photos/te/cat"], short_splits)
    ['photos/tr', 'photos/te']
    >>> _first_parts(["tr/cat", "dog"], short_splits)
    []
    """
    first: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        at = next((at for at, part in enumerate(parts, 1) if is_meant(part)), None)
        if at is None:
            return []
        first["/".join(parts[:at])] = None
    return list(first)
