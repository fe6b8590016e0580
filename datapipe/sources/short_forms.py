"""Short forms of splits' names, and names in other languages.

They may mean splits: what nothing else divides is refused if all of it is called so.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from ..console import format_some
from ..split_names import FOLD, HASH, PART, SPLIT_OF, TEST, TRAIN, VAL, split_words
from ..splits import AmbiguousSplitError
from .shard_names import check_folds
from .split_paths import Paths

logger = logging.getLogger(__name__)

SHORT = {
    TRAIN: "tr tra learn learning fit entrenamiento entrainement apprentissage treino treinamento addestramento",
    VAL: "va vl vld check validacion validacao validierung validazione validatie",
    TEST: "te ts tes prueba teste",
}
SHORT_OF = {word: split for split, words in SHORT.items() for word in words.split()}


@lru_cache(1024)
def short_splits(text: str) -> frozenset[str]:
    """Return the splits that short forms in a text may mean.

    >>> short_splits("set1_tr.tar"), short_splits("Validación 2"), short_splits("tree.tar")
    (frozenset({'train'}), frozenset({'val'}), frozenset())
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = (word.lower() for run in re.findall("[A-Za-z]+", plain) for word in PART.findall(run))
    return frozenset(SHORT_OF[word] for word in words if word in SHORT_OF)


def mean_splits(texts: Collection[str]) -> bool:
    """Whether each of some texts may mean one split by its short form, or names one, and they are not all the same."""
    splits = [_splits(text) for text in texts]
    return all(len(of_text) == 1 for of_text in splits) and len(set().union(*splits)) > 1


def _splits(text: str) -> Collection[str]:
    return {SPLIT_OF[word] for word in split_words(text)} or short_splits(text)


def check_undivided(files: Sequence[str], paths: Paths, labels: Collection[str], source: Path) -> None:
    """Check what no name of a split divides. It is logged that files of several names are all for training.

    Args:
        files: The tars or tables, by their paths below the source.
        paths: The samples' paths in them.
        labels: The samples' labels: a folder called so is a class.
        source: The data set, for messages.

    Raises:
        AmbiguousSplitError: All files, or folders or files in the paths, are called `tr` or `va`, say, or as folds.
    """
    folds = first_parts(paths.folders, FOLD.search)
    if {os.path.basename(name) for name in folds}.isdisjoint(labels):
        check_folds(folds, source)
    short = first_parts(paths.folders, short_splits), first_parts(paths.files, short_splits)
    for names in (files, *short):
        if mean_splits(names) and {os.path.basename(name) for name in names}.isdisjoint(labels):
            groups: dict[str, list[str]] = {TRAIN: [], VAL: [], TEST: []}
            for pattern in _patterns(names):
                groups[min(short_splits(pattern))].append(pattern)
            chosen = (TRAIN, groups[TRAIN]), (VAL, groups[VAL] or groups[TEST])
            options = " ".join(f"--split {split}={shlex.quote(text)}" for split, texts in chosen for text in texts)
            why = f"{format_some(list(names))} may be called as splits"
            advice = f"type {options} if they are, or --split train=. if all are for training"
            raise AmbiguousSplitError(source, why, advice)
    if len(patterns := _patterns(files)) > 1:
        logger.info("%s: %s are all for training, since none is called as a split", source, format_some(patterns))


def _patterns(names: Iterable[str]) -> list[str]:
    """Return patterns of names that differ in more than their numbers."""
    return list(dict.fromkeys(re.sub("[0-9]+", "*", HASH.sub("0", glob.escape(name))) for name in names))


def first_parts(paths: Iterable[str], is_meant: Callable[[str], object]) -> list[str]:
    """List the first part of each path, with those above it, that is meant; [] if a path has none.

    >>> first_parts(["photos/tr/cat", "photos/tr/dog", "photos/te/cat"], short_splits)
    ['photos/tr', 'photos/te']
    >>> first_parts(["tr/cat", "dog"], short_splits)
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
