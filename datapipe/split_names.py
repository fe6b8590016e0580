"""What names say of splits, and patterns of names: one rule for folders, files, shards and columns.

A name speaks of a split if a word of it is one of _WORDS, in any case, whatever numbers stand around it: `Train2017`,
`2021_valid`, `imagenet-validation-000001.tar`, `testset`.
"""

from __future__ import annotations

import fnmatch
import glob
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from shlex import quote

from .console import format_count

TRAIN, VAL, TEST = "train", "val", "test"
_WORDS = {
    TRAIN: ("train", "training", "trn"),
    VAL: ("val", "valid", "validation", "minival", "eval", "evaluation", "dev"),
    TEST: ("test", "testing", "tst", "holdout"),
}
SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
SPLIT_NOUNS = "sets?|splits?|data|images?|imgs?|pictures|photos|jpe?g|png|shards?|folder"  # of which there are splits
_OF_FILES = (  # folders named after what lies in them, or after how that came about
    "images?|imgs?|pictures|photos|jpe?gs?|pngs?|shards?|tars?|labels?|data(sets?)?|files?|class(es)?|raw|originals?|packed"
    "|(un)?zipped|unpacked|extracted|download(s|ed)?|(pre)?processed|resized|sorted|clean(ed)?|all|archives?|new|v?[0-9]+"
)
SUFFIXES = {"tar", "gz", "tgz", "zst", "bz", "xz", "parquet", "csv", "tfrecord", "idx"}  # of files, without numbers
HASH = re.compile(r"\b(?=[a-f]*[0-9])[0-9a-f]{6,}\b")  # in names of files that are called by their content
# The number of a fold: fold_0, cv-1, 2nd_fold; not manifold2.
FOLD = re.compile(
    "(?i)(?:(?<!mani)(?<!scaf)folds?[-_ ]?|(?<![a-z])cv[-_ ]?|(?=[0-9]+(?:st|nd|rd|th)[-_ ]?fold))([0-9]+)"
)
WORD = re.compile(rf"({'|'.join(sorted(SPLIT_OF, key=len, reverse=True))})({SPLIT_NOUNS})?")
GLUED = re.compile("(?i)(?<![a-z])train[a-z]|[a-z]train(?![a-z])")  # as in imagenettrain.tar, beside another name
PART = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a name in camel case
# What is written as one word, or as several.
_SPELT = {"h[oe]ld[-_ ]?out": "-holdout-", "t10k": "-test-", "train[-_ ]?val(?![a-z])": "-train-val-"}


def cased_words(name: str) -> list[str]:
    """List the words of a name as they are written, without their numbers."""
    for spelling, words_of_it in _SPELT.items():
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


def splits_of(text: str) -> set[str]:
    """Return the splits that a text speaks of."""
    return {SPLIT_OF[word] for word in split_words(text)}


def is_split_name(name: str) -> bool:
    """Whether a name says nothing but a split: `val`, `Train2017`, `test_images`; not `bullet_train`."""
    others = [word for word in _words(name) if not WORD.fullmatch(word) and not re.fullmatch(SPLIT_NOUNS, word)]
    return bool(split_words(name)) and not others


def pure_splits(names: Iterable[str]) -> set[str]:
    """Return the splits of those names that say nothing else."""
    return {split for name in names if is_split_name(name) for split in splits_of(name)}


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
        if not is_file and not re.fullmatch(_OF_FILES, place.name.lower()):
            return place
    return source


def own_splits(source: Path) -> set[str]:
    """Return the splits that a source's own name speaks of; `my-test` may be a trial: see `check_own_name`."""
    return splits_of_name(naming_folder(source).name)


def splits_of_name(name: str) -> set[str]:
    """Return the splits that a name speaks of that stands for all images, of which a trial may be called `my-test`."""
    splits = splits_of(name)
    return set() if splits == {TEST} and not is_split_name(name) else splits


# --- short forms, and names in other languages ------------------------------------------------------

# They may mean splits: what nothing else divides is refused if all of it is called so.
_SHORT = {
    TRAIN: "tr tra learn learning fit entrenamiento entrainement apprentissage treino treinamento addestramento",
    VAL: "va vl vld check validacion validacao validierung validazione validatie",
    TEST: "te ts tes prueba teste",
}
_SHORT_OF = {word: split for split, words in _SHORT.items() for word in words.split()}


@lru_cache(1024)
def short_splits(text: str) -> frozenset[str]:
    """Return the splits that short forms in a text may mean.

    >>> short_splits("set1_tr.tar"), short_splits("Validación 2"), short_splits("tree.tar")
    (frozenset({'train'}), frozenset({'val'}), frozenset())
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = (word.lower() for run in re.findall("[A-Za-z]+", plain) for word in PART.findall(run))
    return frozenset(_SHORT_OF[word] for word in words if word in _SHORT_OF)


def mean_splits(texts: Collection[str]) -> bool:
    """Whether each of some texts may mean one split by its short form, or names one, and they are not all the same."""
    splits = [splits_of(text) or short_splits(text) for text in texts]
    return all(len(of_text) == 1 for of_text in splits) and len(set().union(*splits)) > 1


# --- patterns that name parts of a data set, as `--split` takes them --------------------------------

NAMED = 3  # names, patterns or readings that a message gives


def list_some(names: Sequence[str]) -> str:
    """Return some of many names in words, and the number of the others.

    >>> list_some(["a", "b", "c", "d"])
    'a, b, c and 1 other'
    """
    more = f" and {format_count(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a path below the source, its last part or a folder above it; "." names all."""
    if pattern == ".":
        return True
    parts = name.split("/")
    above = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return any(fnmatch.fnmatchcase(text, pattern) for text in (*above, parts[-1]))


def options_of(splits: Mapping[str, str]) -> str:
    """Return `--split` options that name what is of train and of val, or else of test, given each name's split."""
    groups = {split: [name for name in splits if splits[name] == split] for split in (TRAIN, VAL, TEST)}
    test = groups.pop(TEST)
    groups[VAL] = groups[VAL] or test
    return split_options(groups, []) or "--split train=PATTERN --split val=PATTERN"


def split_options(groups: Mapping[str, list[str]], others: Sequence[str]) -> str:
    """Return `--split` options that name the names of each split, and no others; "" where few patterns do not.

    Args:
        groups: The names, by split.
        others: Names that the options must not name.
    """
    patterns = {}
    for split, names in groups.items():
        of_others = [*others, *(name for key, its in groups.items() if key != split for name in its)]
        patterns[split] = _patterns(names, of_others)
        if names and not patterns[split]:
            return ""
    return named_options(patterns)


def named_options(patterns: Mapping[str, Iterable[str]]) -> str:
    """Return `--split` options that name the patterns of each split."""
    return " ".join(f"--split {split}={quote(pattern)}" for split, its in patterns.items() for pattern in its)


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return few patterns that name some names, and not the others; [] if there are none."""
    escaped = [glob.escape(name) for name in names]
    candidates = [escaped]
    if len(names) > NAMED:
        bare = [HASH.sub("*", pattern) for pattern in escaped]
        candidates = [[re.sub("[0-9]+", any_number, pattern) for pattern in bare] for any_number in ("*", "[0-9]*")]
        first, last = _common_start(names), _common_start([name[::-1] for name in names])[::-1]
        candidates.append([f"{glob.escape(first)}*{glob.escape(last)}"])
    for patterns in map(list, map(dict.fromkeys, candidates)):
        is_few = len(patterns) <= NAMED and all(any(matches(name, pattern) for pattern in patterns) for name in names)
        if is_few and not any(matches(name, pattern) for name in others for pattern in patterns):
            return patterns
    return []


def _common_start(names: Sequence[str]) -> str:
    """Return what all names begin with."""
    least, most = min(names), max(names)
    return next((least[:at] for at, char in enumerate(least) if char != most[at]), least)
