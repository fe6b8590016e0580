"""Columns that may say which split a row belongs to: of tables, and fields of WebDataset's JSON.

What those of a whole data set say together is in `split_table`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..split_names import is_split_name, short_splits, split_words, splits_of
from ..splits import SplitRule
from .labels import LABEL_COLUMN

_COLUMNS = ("split", "subset", "set", "partition", "phase", "usage", "fold", "cv", "tvt")
_COLUMN = re.compile("splits?|subset|partition|k?folds?|(?:train|val(?:id)?|dev|test){2,}")  # a word of a column's name
# What may stand beside names of splits in that of a column, as in is_valid, isTrain, train_or_test.
BESIDE = re.compile("(?i)(?<![a-z])(?:(?:is|in|for|flag|or|and|vs)(?![a-z])|is(?=train|val|test))")
TRUTH = {
    **dict.fromkeys(("true", "t", "yes", "y", "1", "1.0"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0", "0.0"), False),
}
# Of values that name no split: a column with more distinct ones, or longer ones, is text.
_MAX_OTHERS, _MAX_WORDS = 20, 2

MAX_VALUES = 1000
_LONG_NUMBER = re.compile("[0-9]{3,}")
_Says = tuple[tuple[str, ...], bool]

Said = tuple[tuple[str, str], ...]  # the columns of a row that may be of splits, and their values


class Part(NamedTuple):
    """Samples of one file of which the same is said."""

    file: str  # below the source
    said: Said = ()


class Columns:
    """The columns of a file that may be of splits. Those that turn out to be others are dropped, row by row.

    Few of their values are kept, however many there are: of a column that is not called as one of splits, all that name
    none stand for the first of them. In columns that the user does not name, so do those past MAX_VALUES that say the
    same of splits.
    """

    def __init__(self, rule: SplitRule) -> None:
        self._patterns = bool(rule.patterns)
        self._meant = {pattern.partition("=")[0].lower() for _, pattern in rule.patterns if "=" in pattern}
        self._dropped: set[str] = set()
        self._known: dict[str, dict[str, tuple[str, str]]] = {}  # by column and value: the column, what stands for it
        self._first: dict[tuple[str, _Says], tuple[str, str]] = {}  # by column and what the value says
        self._num_others: Counter[str] = Counter()  # values that name no split, by column

    def alive(self, names: Iterable[str]) -> list[str]:
        """List those columns that may still be of splits."""
        return [name for name in names if name not in self._dropped]

    def is_named(self, name: str) -> bool:
        """Whether a column is one of splits by its name, or since the user says so."""
        return name.lower() in self._meant or is_column(name)

    def may_be(self, name: str, values: Iterable[str]) -> bool:
        """Whether a column with some of its values may be one of splits."""
        self.said((name, value) for value in values)
        return name not in self._dropped

    def said(self, fields: Iterable[tuple[str, str]]) -> Said:
        """Return what the columns of a row may say of its split."""
        said = []
        for name, value in fields:
            if name not in self._dropped:
                pair = self._known.setdefault(name, {}).get(value) or self._stand_in(name, value)
                if pair is None:
                    self._dropped.add(name)
                    del self._known[name]
                else:
                    said.append(pair)
        return tuple(said)

    def _stand_in(self, name: str, value: str) -> tuple[str, str] | None:
        """Return a column and what stands for a new value of it; None if the column is of other things."""
        known, pair = self._known[name], (name, value)
        is_full = len(known) >= MAX_VALUES and name.lower() not in self._meant
        says = words, is_pure = _says(_LONG_NUMBER.sub("000", value) if is_full else value)
        if is_full and self._patterns:
            return None
        if value and not self.is_named(name) and (not words or (self._num_others[name] and not is_pure)):
            self._num_others[name] += 1
            is_text = self._num_others[name] > _MAX_OTHERS or len(value.split()) > _MAX_WORDS
            if self._patterns or is_text or LABEL_COLUMN.fullmatch(name):
                return None
            pair = self._first.setdefault((name, (tuple(short_splits(value)), False)), pair)
        elif is_full:
            return self._first.setdefault((name, says), pair)
        known[value] = pair
        return pair

    def keep(self, said: Sequence[Said]) -> list[Said]:
        """Return what rows say without the columns that were dropped later."""
        kept = {of_row: tuple(pair for pair in of_row if pair[0] not in self._dropped) for of_row in set(said)}
        return [kept[of_row] for of_row in said]


@lru_cache(1024)
def _says(value: str) -> _Says:
    """Return a value's words of splits, and whether it says nothing else."""
    return tuple(split_words(value)), is_split_name(value)


@lru_cache(1024)
def is_column(name: str) -> bool:
    """Whether a column is called as one of splits: `split`, `data_split`, `is_valid`; not `test_score`."""
    words = re.findall("[a-z]+", name.lower())
    return name.lower() in _COLUMNS or any(map(_COLUMN.fullmatch, words)) or is_split_name(_bare(name))


def _bare(name: str) -> str:
    """Return the name of a column, or of a field such as `meta.is_valid`, without `is`."""
    return BESIDE.sub("", name.rpartition(".")[2])


def flag_split(name: str, values: Iterable[str]) -> str | None:
    """Return the split that a column says of each row whether it is of: `val` of `is_valid` with True and False."""
    bare = _bare(name)
    splits = splits_of(bare) if is_split_name(bare) else set()
    return splits.pop() if len(splits) == 1 and all(value.lower() in TRUTH for value in values) else None


def column_value(part: Part, column: str | None) -> str:
    """Return a column's value in a part, `column=` if it is empty; the part's file if it lacks the column."""
    value = dict(part.said).get(column or "")
    return part.file if value is None else value or f"{column}="
