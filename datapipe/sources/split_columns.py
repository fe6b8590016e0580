"""Columns that may say which split a row belongs to: of tables, and fields of WebDataset's JSON.

What those of a whole data set say together is in `split_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..splits import SPLIT_OF, SplitRule, is_split_name, split_words
from .labels import LABEL_COLUMN

COLUMNS = ("split", "subset", "set", "partition", "phase", "usage", "fold")
COLUMN = re.compile("splits?|subset|partition|k?folds?")  # a word of a column's name
BESIDE = re.compile("(?i)(?<![a-z])(?:(?:is|in|for|flag)(?![a-z])|is(?=train|val|test))")  # as in is_valid, isTrain
TRUTH = {
    **dict.fromkeys(("true", "t", "yes", "y", "1", "1.0"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0", "0.0"), False),
}
# Of values that name no split: a column with more distinct ones, or longer ones, is text.
MAX_OTHERS, MAX_WORDS = 20, 2

Said = tuple[tuple[str, str], ...]  # the columns of a row that may be of splits, and their values
_speaks = lru_cache(1024)(lambda value: bool(split_words(value)))


class Part(NamedTuple):
    """Samples of one file of which the same is said."""

    file: str  # below the source
    said: Said = ()


class Columns:
    """The columns of a file that may be of splits. Those that turn out to be others are dropped, row by row.

    Of a column that is not called as one of splits, all values that name none stand for the first of them.
    """

    def __init__(self, rule: SplitRule) -> None:
        self._patterns = bool(rule.patterns)
        self._meant = {pattern.partition("=")[0].lower() for _, pattern in rule.patterns if "=" in pattern}
        self._dropped: set[str] = set()
        self._others: dict[str, dict[str, None]] = {}  # values that name no split, by column

    def alive(self, names: Iterable[str]) -> list[str]:
        """List those columns that may still be of splits."""
        return [name for name in names if name not in self._dropped]

    def is_named(self, name: str) -> bool:
        """Whether a column is one of splits by its name, or since the user says so."""
        return name.lower() in self._meant or is_column(name)

    def may_be(self, name: str, values: Iterable[str]) -> bool:
        """Whether a column with some of its values may be one of splits."""
        self.said((name, value) for value in values)
        return bool(self.alive([name]))

    def said(self, fields: Iterable[tuple[str, str]]) -> Said:
        """Return what the columns of a row may say of its split."""
        said: list[tuple[str, str]] = []
        for name, value in fields:
            if name in self._dropped:
                continue
            if not self.is_named(name):
                if LABEL_COLUMN.fullmatch(name):
                    self._dropped.add(name)
                    continue
                others = self._others.get(name, {})
                if value and (not _speaks(value) or (others and not is_split_name(value))):
                    others = self._others.setdefault(name, others)
                    others[value] = None
                    if self._patterns or len(others) > MAX_OTHERS or len(value.split()) > MAX_WORDS:
                        self._dropped.add(name)
                        continue
                    value = next(iter(others))
            said.append((name, value))
        return tuple(said)

    def keep(self, said: Sequence[Said]) -> list[Said]:
        """Return what rows say without the columns that were dropped later."""
        kept = {of_row: tuple(pair for pair in of_row if pair[0] not in self._dropped) for of_row in set(said)}
        return [kept[of_row] for of_row in said]


@lru_cache(1024)
def is_column(name: str) -> bool:
    """Whether a column is called as one of splits: `split`, `data_split`, `is_valid`; not `test_score`."""
    words = re.findall("[a-z]+", name.lower())
    return name.lower() in COLUMNS or any(map(COLUMN.fullmatch, words)) or is_split_name(BESIDE.sub("", name))


def splits_of(text: str) -> set[str]:
    """Return the splits that a text speaks of."""
    return {SPLIT_OF[word] for word in split_words(text)}


def flag_split(name: str, values: Iterable[str]) -> str | None:
    """Return the split that a column says of each row whether it is of: `val` of `is_valid` with True and False."""
    bare = BESIDE.sub("", name)
    splits = splits_of(bare) if is_split_name(bare) else set()
    return splits.pop() if len(splits) == 1 and all(value.lower() in TRUTH for value in values) else None


def column_value(part: Part, column: str | None) -> str:
    """Return a column's value in a part, `column=` if it is empty; the part's file if it lacks the column."""
    value = dict(part.said).get(column or "")
    return part.file if value is None else value or f"{column}="
