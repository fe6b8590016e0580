"""Which split the parts of a data set belong to: folders, files, shards, and values of columns.

If the name of one speaks of a split (see `split_names`), each must. Those of one split are joined, unless they may be
variants of it (see `split_variants`).
"""

from __future__ import annotations

import glob
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError, SourceError
from .split_names import (
    GLUED,
    NAMED,
    SPLIT_OF,
    TEST,
    TRAIN,
    VAL,
    list_some,
    matches,
    naming_folder,
    own_splits,
    split_options,
    split_words,
)
from .split_variants import Variants, find_variants, folds_in

logger = logging.getLogger(__name__)

VAL_OR_TRAIN = "type --split val=. if its images are for validation, or --split train=. if they are for training"
CHOOSE = "say with --split train=PATTERN and --split val=PATTERN what to take; the rest is left out"
_REST = "(patterns, any number of them); what no --split names is left out"

Typed = Callable[[str], Sequence[str]]  # gives what `--split` names a part by


class AmbiguousSplitError(SourceError):
    """What belongs to which split can be read in two ways: `why`, and what to type."""

    def __init__(self, source: Path, why: str, advice: str) -> None:
        super().__init__(f"{why}: {advice}", path=source)
        self.why = why
        self.advice = advice


class VariantsError(AmbiguousSplitError):
    """Parts of one split may be variants of each other.

    Attributes:
        variants: The variants of each split that has some.
        choices: Words that say what to type to take one of them.
        joined: Words that say what to type to take all; "" if nothing is known.
    """

    def __init__(self, source: Path, why: str, variants: Mapping[str, Variants], choices: str, joined: str) -> None:
        advice = f"{choices}; to take all as one, {joined}" if joined else choices
        super().__init__(source, why, f"{advice} (patterns; the rest is left out)" if choices != CHOOSE else CHOOSE)
        self.variants, self.choices, self.joined = variants, choices, joined


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

    def covers(self, names: Sequence[str]) -> bool:
        """Whether each pattern names one of the names at least."""
        return all(any(matches(name, pattern) for name in names) for _, pattern in self.patterns)

    def divide(self, names: Sequence[str], source: Path, typed: Typed = lambda name: [name]) -> dict[str, list[str]]:
        """Divide the parts of a data set, which are files or folders, by split.

        Args:
            names: Paths of the parts below the source.
            source: The data set, for its own name and for messages.
            typed: Function that returns the names by which `--split` selects a part, for messages.

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
            why = f"{first} names a split, and {list_some(silent)} {'do' if len(silent) > 1 else 'does'} not"
            known = {name: SPLIT_OF[[*words[name], TRAIN][0]] for name in names if name not in silent}
            known = {text: split for name, split in known.items() for text in typed(name)}
            raise AmbiguousSplitError(source, why, _advise(known, [text for name in silent for text in typed(name)]))
        splits: dict[str, list[str]] = {}
        for name in names:
            chosen = {SPLIT_OF[word] for word in words[name]}
            if len(chosen) > 1:
                why = f"the name of {name} has {' and '.join(dict.fromkeys(words[name]))} in it"
                text = shlex.quote(glob.escape(typed(name)[0]))
                advice = f"say which it is, as --split train={text} or --split val={text}"
                raise AmbiguousSplitError(source, why, advice)
            splits.setdefault(chosen.pop(), []).append(name)
        splits = {split: splits[split] for split in (TRAIN, VAL, TEST) if split in splits}
        _check_variants(splits, words, source, typed)
        return splits

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
            there = f"there is {list_some(names)}" if names else "there is nothing that could be divided"
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


def _check_variants(
    splits: Mapping[str, list[str]], words: Mapping[str, Sequence[str]], source: Path, typed: Typed
) -> None:
    """Raise VariantsError if names of one split may be variants of each other; warn if they differ otherwise.

    `splits`: the names of each; `words`: those of splits in each name.
    """
    there = {split: names for split, names in splits.items() if split != TEST or VAL not in splits}
    variants = {split: its for split, names in there.items() if (its := find_variants(names))}
    if doubtful := {split: its for split, its in variants.items() if its.are_doubtful}:
        split, its = next(iter(doubtful.items()))
        first, second, *more = (names[0] for names in its.groups.values())
        why = f"holds {f'{first} and {second}' if not more else list_some([first, second, *more])}, all of {split}"
        if words[first][-1] != words[second][-1]:
            why = f"holds both {words[first][-1]} ({first}) and {words[second][-1]} ({second}), which mean the same"
        elif len(folds := folds_in(there[split])) > 1:
            why = f"holds folds {', '.join(folds)}, all of {split}"
        raise VariantsError(source, why, doubtful, *_advise_variants(there, doubtful, splits, typed))
    for split, its in variants.items():
        names = [names[0] for names in its.groups.values()]
        message = "%s: %s are joined for %s, though they are called differently: --split %s=PATTERN takes some of them"
        logger.warning(message, source, list_some(names), split, VAL if split == TEST else split)


def _advise_variants(
    there: Mapping[str, list[str]], variants: Mapping[str, Variants], splits: Mapping[str, list[str]], typed: Typed
) -> tuple[str, str]:
    """Say what to type to take one of the variants, and to take all.

    `there`: the names of each split that is taken, `splits`: of all; `variants`: those of the splits that have several.
    """
    groups = {split: its.groups for split, its in variants.items()}
    choices: list[Mapping[str, list[str]]] = []
    for key in dict.fromkeys(key for of_split in groups.values() for key in of_split):
        if TRAIN not in groups or key in groups[TRAIN]:
            choices.append({split: groups.get(split, {}).get(key, names) for split, names in there.items()})
    options = []
    for choice in [*choices[:NAMED], there]:
        chosen = {name for names in choice.values() for name in names}
        others = [text for names in splits.values() for name in names if name not in chosen for text in typed(name)]
        texts = {
            VAL if split == TEST else split: [text for name in names for text in typed(name)]
            for split, names in choice.items()
        }
        options.append(split_options(texts, others))
    *each, everything = options
    typable = [f"type {text}" for text in each if text]
    more = ", or others likewise" * (len(choices) > NAMED)
    return f"{', or '.join(typable)}{more}" if typable else CHOOSE, f"type {everything}" if everything else ""


def _advise(known: Mapping[str, str], silent: Sequence[str]) -> str:
    """Say what to type where some names, given with their splits, speak of one, and others are silent."""
    splits = set(known.values())
    as_val = TEST if VAL not in splits else VAL  # a test split is val, if there is none
    groups = {TRAIN: [name for name in known if known[name] == TRAIN]}
    groups[VAL] = [name for name in known if known[name] == as_val]
    if groups[TRAIN] and groups[VAL]:
        options = split_options(groups, [*silent, *(name for name in known if known[name] not in (TRAIN, as_val))])
        return f"type {options} {_REST}" if options else CHOOSE
    other = VAL if groups[TRAIN] else TRAIN
    options = split_options({split: its or list(silent) for split, its in groups.items()}, [])
    return f"if they are {other} type {options} {_REST}" if options else CHOOSE
