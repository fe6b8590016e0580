"""What names say of splits: one rule for folders, files, shards and columns, whoever reads them.

A name speaks of a split if a word of it is one of WORDS, in any case, whatever numbers stand around it: `Train2017`,
`2021_valid`, `imagenet-validation-000001.tar`, `testset`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

TRAIN, VAL, TEST = "train", "val", "test"
WORDS = {
    TRAIN: ("train", "training", "trn"),
    VAL: ("val", "valid", "validation", "minival", "eval", "evaluation", "dev"),
    TEST: ("test", "testing", "tst", "holdout"),
}
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
KINDS = "sets?|splits?|data|images?|imgs?|pictures|photos|jpe?g|png|shards?|folder"  # what a split may be a split of
OF_FILES = (  # folders named after what lies in them, or after how that came about
    "images?|imgs?|pictures|photos|jpe?gs?|pngs?|shards?|tars?|labels?|data(sets?)?|files?|class(es)?|raw|originals?|packed"
    "|(un)?zipped|unpacked|extracted|download(s|ed)?|(pre)?processed|resized|sorted|clean(ed)?|all|archives?|new|v?[0-9]+"
)
SUFFIXES = {"tar", "gz", "tgz", "zst", "bz", "xz", "parquet", "csv", "tfrecord", "idx"}  # of files, without numbers
HASH = re.compile(r"\b(?=[a-f]*[0-9])[0-9a-f]{6,}\b")  # in names of files that are called by their content
# The number of a fold: fold_0, cv-1, 2nd_fold; not manifold2.
FOLD = re.compile(
    "(?i)(?:(?<!mani)(?<!scaf)folds?[-_ ]?|(?<![a-z])cv[-_ ]?|(?=[0-9]+(?:st|nd|rd|th)[-_ ]?fold))([0-9]+)"
)
WORD = re.compile(rf"({'|'.join(sorted(SPLIT_OF, key=len, reverse=True))})({KINDS})?")
GLUED = re.compile("(?i)(?<![a-z])train[a-z]|[a-z]train(?![a-z])")  # as in imagenettrain.tar, beside another name
PART = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a name in camel case
# What is written as one word, or as several.
SPELT = {"h[oe]ld[-_ ]?out": "-holdout-", "t10k": "-test-", "train[-_ ]?val(?![a-z])": "-train-val-"}


def cased_words(name: str) -> list[str]:
    """List the words of a name as they are written, without their numbers."""
    for spelling, words_of_it in SPELT.items():
        name = re.sub(spelling, words_of_it, name, flags=re.IGNORECASE)
    words = []
    for run in re.findall("[A-Za-z]+", name):
        words += [run] if WORD.fullmatch(run.lower()) else PART.findall(run)
    return words


def _words(name: str) -> list[str]:
    return [word.lower() for word in cased_words(name)]


def split_words(name: str) -> list[str]:
    """List the words of a name that speak of a split, lower case and in their order.

    >>> split_words("ILSVRC2012_img_val.tar"), split_words("MyTrainImages/valid-1.tar"), split_words("latest.tar")
    (['val'], ['train', 'valid'], [])
    """
    return [match[1] for word in _words(name) if (match := WORD.fullmatch(word))]


def is_split_name(name: str) -> bool:
    """Whether a name says nothing but a split: `val`, `Train2017`, `test_images`; not `bullet_train`."""
    others = [word for word in _words(name) if not WORD.fullmatch(word) and not re.fullmatch(KINDS, word)]
    return bool(split_words(name)) and not others


def have_twins(names: Iterable[str]) -> bool:
    """Whether two names differ in the word for a split alone, such as `seg_train` and `seg_test`."""
    splits: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        others = tuple(word for word in _words(name) if not WORD.fullmatch(word))
        splits.setdefault(others, set()).update(SPLIT_OF[word] for word in split_words(name))
    return any(len(of_stem) > 1 for of_stem in splits.values())


def naming_folder(source: Path) -> Path:
    """Return the first of a source and the folders above it whose name says more than `images` or `data.csv` does.

    >>> naming_folder(Path("/x/val/raw/images/0.tar")), naming_folder(Path("/x/val-2017"))
    (PosixPath('/x/val'), PosixPath('/x/val-2017'))
    """
    for place in (source, *source.parents):
        is_file = place.suffix[1:].lower() in SUFFIXES and not split_words(place.name)
        if not is_file and not re.fullmatch(OF_FILES, place.name.lower()):
            return place
    return source


def own_splits(source: Path) -> set[str]:
    """Return the splits that a source's own name speaks of; `my-test` may be a trial: see `check_own_name`."""
    return splits_of_name(naming_folder(source).name)


def splits_of_name(name: str) -> set[str]:
    """Return the splits that a name speaks of that stands for all images, of which a trial may be called `my-test`."""
    splits = {SPLIT_OF[word] for word in split_words(name)}
    return set() if splits == {TEST} and not is_split_name(name) else splits
