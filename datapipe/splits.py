"""Which split a name speaks of: one rule for folders, files, shards and columns, whoever reads them.

A name speaks of a split if a word of it is one of WORDS, in any case, whatever numbers stand around it: `Train2017`,
`2021_valid`, `imagenet-validation-000001.tar`, `testset`. If one name of a data set does, each must.
"""

from __future__ import annotations

import fnmatch
import glob
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .console import format_count
from .errors import SettingError, SourceError

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
NAMED = 3  # names that a message gives
VAL_OR_TRAIN = "type --split val=. if its images are for validation, or --split train=. if they are for training"
CHOOSE = "say with --split train=PATTERN and --split val=PATTERN what to take; the rest is left out"


def _words(name: str) -> list[str]:
    """List the words of a name, lower case, without their numbers."""
    for spelling, words_of_it in SPELT.items():
        name = re.sub(spelling, words_of_it, name, flags=re.IGNORECASE)
    words = []
    for run in re.findall("[A-Za-z]+", name):
        words += [run] if WORD.fullmatch(run.lower()) else PART.findall(run)
    return [word.lower() for word in words]


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


class AmbiguousSplitError(SourceError):
    """What belongs to which split can be read in two ways: `why`, and what to type."""

    def __init__(self, source: Path, why: str, advice: str) -> None:
        super().__init__(f"{why}: {advice}", path=source)
        self.why = why


@dataclass(frozen=True)
class SplitRule:
    """How splits are told apart: by their words, or by patterns that the user gives.

    Attributes:
        patterns: Pairs of a split, "train" or "val", and a pattern of the shell's of names or paths below the source.
    """

    patterns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> SplitRule:
        """Parse texts such as "val=holdout-*.tar". Raises SettingError."""
        patterns = []
        for text in texts:
            split, equals, pattern = text.partition("=") if isinstance(text, str) else ("", "", "")
            if split not in (TRAIN, VAL) or not equals or not pattern:
                raise SettingError(f"split: {text!r} is not train=PATTERN or val=PATTERN, such as val='holdout-*.tar'")
            patterns.append((split, pattern.removeprefix("./").rstrip("/") or "."))
        return cls(tuple(patterns))

    def below(self, source: Path) -> SplitRule:
        """Return the rule with patterns that begin with the source's own path made relative to it."""
        cut = f"{source}/"
        return SplitRule(tuple((split, pattern.removeprefix(cut) or ".") for split, pattern in self.patterns))

    def divide(self, names: Sequence[str], source: Path) -> dict[str, list[str]]:
        """Divide the parts of a data set, which are files or folders, by split.

        Args:
            names: Their paths below the source.
            source: The data set, for its own name and for messages.

        Returns:
            The names of each split that there is: "train", "val", "test". All are train's if none speaks of a split.

        Raises:
            AmbiguousSplitError: It can be read in two ways.
            SettingError: The patterns do not fit the names.
        """
        if self.patterns:
            return self._divide_by_pattern(names, source)
        words = dict(zip(names, _differing([split_words(name) for name in names]), strict=True))
        speaking = [name for name in names if words[name] or GLUED.search(name)]
        if not speaking or (len(speaking) == len(names) and not any(words.values())):
            return {TRAIN: list(names)} if names else {}
        without = [name for name in names if not words[name]]
        if silent := [name for name in without if name not in speaking] or without:
            first = next(name for name in speaking if name not in silent)
            why = f"{first} names a split, and {_list(silent)} {'do' if len(silent) > 1 else 'does'} not"
            known = {name: SPLIT_OF[[*words[name], TRAIN][0]] for name in names if name not in silent}
            raise AmbiguousSplitError(source, why, _advise(known, silent))
        splits: dict[str, list[str]] = {}
        synonyms: dict[str, str] = {}
        for name in names:
            chosen = {SPLIT_OF[word] for word in words[name]}
            if len(chosen) > 1:
                why = f"the name of {name} has {' and '.join(dict.fromkeys(words[name]))} in it"
                advice = f"say which it is, as --split train={shlex.quote(name)} or --split val={shlex.quote(name)}"
                raise AmbiguousSplitError(source, why, advice)
            (split,), word = chosen, words[name][-1]
            if synonyms.setdefault(split, word) != word:
                why = f"holds both {synonyms[split]} ({splits[split][0]}) and {word} ({name}), which mean the same"
                raise AmbiguousSplitError(source, why, CHOOSE)
            splits.setdefault(split, []).append(name)
        for split, of_split in splits.items():
            if (split != TEST or VAL not in splits) and (why := _find_variants(of_split)):
                raise AmbiguousSplitError(source, f"{why}, all of {split}", CHOOSE)
        return {split: splits[split] for split in (TRAIN, VAL, TEST) if split in splits}

    def _divide_by_pattern(self, names: Sequence[str], source: Path) -> dict[str, list[str]]:
        splits: dict[str, list[str]] = {}
        unused = {pattern for _, pattern in self.patterns}
        for name in names:
            hits = [(split, pattern) for split, pattern in self.patterns if matches(name, pattern)]
            unused -= {pattern for _, pattern in hits}
            if len({split for split, _ in hits}) > 1:
                raise SettingError(f"split: {name} in {source} is named by {hits[0][1]!r} and by {hits[1][1]!r}")
            if hits:
                splits.setdefault(hits[0][0], []).append(name)
        if unused:
            there = f"there is {_list(names)}" if names else "there is nothing that could be divided"
            raise SettingError(f"split: {min(unused)!r} names nothing in {source}; {there}")
        return {split: splits[split] for split in (TRAIN, VAL) if split in splits}

    def check_own_name(self, source: Path) -> None:
        """Raise AmbiguousSplitError for a source called `imagenet-val`, say, if nothing in it speaks of a split.

        `my-test` may be a trial, so words for a test split count only if the name says nothing else.
        """
        splits = own_splits(source)
        if splits != {VAL} and splits != {TEST}:
            return
        name = naming_folder(source).name
        why = f"is called {name}" if name == source.name else f"lies in {name}"
        why += ", and nothing in it names a split"
        raise AmbiguousSplitError(source, why, VAL_OR_TRAIN)


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


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a path below the source, its last part or a folder above it; "." names all."""
    if pattern == ".":
        return True
    parts = name.split("/")
    above = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return any(fnmatch.fnmatchcase(text, pattern) for text in (*above, parts[-1]))


def _differing(words: list[list[str]]) -> list[list[str]]:
    """Leave out what all names begin or end with, as in `test-images-train` and `test-images-val`, if more remains."""
    shortest = min(map(len, words), default=0)
    if len({tuple(SPLIT_OF[word] for word in of_name) for of_name in words}) < 2 or not shortest:
        return words
    first = next((i for i in range(shortest) if len({of_name[i] for of_name in words}) > 1), shortest)
    cut = [of_name[first:] for of_name in words]
    shortest = min(map(len, cut))
    last = next((i for i in range(shortest) if len({of_name[-1 - i] for of_name in cut}) > 1), shortest)
    cut = [of_name[: len(of_name) - last] for of_name in cut]
    return cut if all(cut) else words


def _find_variants(names: Sequence[str]) -> str:
    """Say which files or folders of a split may be folds, or parts of each other; "" if none are."""
    if len(folds := {match[1] for name in names for match in FOLD.finditer(name)}) > 1:
        return f"holds folds {', '.join(sorted(folds, key=int))}"
    stems: dict[frozenset[str], str] = {}
    for name in names:
        stems.setdefault(frozenset(_words(HASH.sub("", name))) - SUFFIXES, name)
    least = min(stems, key=len)
    more = next((name for stem, name in stems.items() if least < stem), None)
    return f"holds {stems[least]} and {more}" if more else ""


def _advise(known: Mapping[str, str], silent: Sequence[str]) -> str:
    """Say what to type where some names speak of no split.

    Args:
        known: The split of each name that does.
        silent: The others.
    """
    splits = set(known.values())
    as_val = TEST if VAL not in splits else VAL  # a test split is val, if there is none
    groups = {TRAIN: [name for name in known if known[name] == TRAIN]}
    groups[VAL] = [name for name in known if known[name] == as_val]
    rest = "(patterns, any number of them); what no --split names is left out"
    if groups[TRAIN] and groups[VAL]:
        options = split_options(groups, [*silent, *(name for name in known if known[name] not in (TRAIN, as_val))])
        return f"type {options} {rest}" if options else CHOOSE
    other = VAL if groups[TRAIN] else TRAIN
    options = split_options({split: its or list(silent) for split, its in groups.items()}, [])
    return f"if they are {other} type {options} {rest}" if options else CHOOSE


def options_of(splits: Mapping[str, str]) -> str:
    """Return `--split` options that name what is of train and of val, or of test if nothing is of val.

    Args:
        splits: The split of each name.
    """
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
    words = []
    for split, names in groups.items():
        of_others = [*others, *(name for key, its in groups.items() if key != split for name in its)]
        patterns = [glob.escape(name) for name in names]
        if len(names) > NAMED:
            patterns = list(dict.fromkeys(re.sub("[0-9]+", "*", pattern) for pattern in patterns))
        if len(patterns) > NAMED or any(matches(name, pattern) for name in of_others for pattern in patterns):
            return ""
        words += [f"--split {split}={shlex.quote(pattern)}" for pattern in patterns]
    return " ".join(words)


def _list(names: Sequence[str]) -> str:
    more = f" and {format_count(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
