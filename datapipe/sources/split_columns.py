"""Columns that say which split a row belongs to: of tables, and fields of WebDataset's JSON.

A column is one of splits if it is called as such, or if words of splits are all that it holds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..splits import SPLIT_OF, TRAIN, AmbiguousSplitError, SplitRule, is_split_name, split_words

COLUMNS = ("split", "subset", "set", "partition", "phase", "usage", "fold")
COLUMN = re.compile("splits?|subset|partition|k?folds?")  # a word of a column's name
BESIDE = re.compile("(?i)(?<![a-z])(is|in|for|flag)(?![a-z])")  # as in is_valid

Said = tuple[tuple[str, str], ...]  # the columns of a row that may be of splits, and their values
_speaks = lru_cache(1024)(lambda value: bool(split_words(value)))


class Part(NamedTuple):
    """Samples of one file of which the same is said."""

    file: str  # below the source
    said: Said = ()


class Columns:
    """The columns of a table that may be of splits. Those that turn out to be others are dropped, row by row."""

    def __init__(self, rule: SplitRule) -> None:
        self._patterns = bool(rule.patterns)
        self._meant = {pattern.partition("=")[0].lower() for _, pattern in rule.patterns if "=" in pattern}
        self._dropped: set[str] = set()

    def alive(self, names: Iterable[str]) -> list[str]:
        """List those columns that may still be of splits."""
        return [name for name in names if name not in self._dropped]

    def is_named(self, name: str) -> bool:
        """Whether a column is one of splits by its name, or since the user says so."""
        return name.lower() in self._meant or is_column(name)

    def said(self, fields: Iterable[tuple[str, str]]) -> Said:
        """Return what the columns of a row say of its split. Raises ValueError for what cannot be understood."""
        said: list[tuple[str, str]] = []
        for name, value in fields:
            if self.is_named(name):
                if not self._patterns and not _speaks(value):
                    other = next((f"; if {column} counts, --split train={column}=PATTERN" for column, _ in said), "")
                    options = shlex.join(["--split", f"train={name}=PATTERN", "--split", f"val={name}=PATTERN"])
                    raise ValueError(
                        f"{name} is {value!r}, which names no split that datapipe knows: say which of its values are "
                        f"which, as {options}{other}"
                    )
            elif name in self._dropped:
                continue
            elif value and not _speaks(value):
                self._dropped.add(name)
                continue
            said.append((name, value))
        return tuple(said)


@lru_cache(1024)
def is_column(name: str) -> bool:
    """Whether a column is called as one of splits: `split`, `data_split`, `is_valid`; not `test_score`."""
    words = re.findall("[a-z]+", name.lower())
    return name.lower() in COLUMNS or any(map(COLUMN.fullmatch, words)) or is_split_name(BESIDE.sub("", name))


def column_value(part: Part, column: str | None) -> str:
    """Return a column's value in a part, `column=` if it is empty; the part's file if it lacks the column."""
    value = dict(part.said).get(column or "")
    return part.file if value is None else value or f"{column}="


def columns_of_files(parts: Sequence[Part], source: Path) -> dict[str, str | None]:
    """Return the column of splits of each file, or None."""
    chosen: dict[str, str | None] = {}
    for file, candidates in _candidates(parts, source).items():
        chosen[file] = next((name for name, values in candidates.items() if _is_of_splits(name, values)), None)
    return chosen


def _candidates(parts: Sequence[Part], source: Path) -> dict[str, dict[str, set[str]]]:
    """Return the columns of each file that all its rows have, and their values."""
    seen: dict[str, list[dict[str, str]]] = {}
    for part in parts:
        seen.setdefault(part.file, []).append(dict(part.said))
    candidates = {}
    for file, rows in seen.items():
        in_all = [name for name in rows[0] if all(name in row for row in rows)]
        partial = {name for row in rows for name in row if is_column(name)} - set(in_all)
        if partial:
            column = min(partial)
            raise AmbiguousSplitError(
                source,
                f"only some samples of {file} have {column}",
                f"say what to take, as --split train={column}=train --split val={column}=val, or all: --split train=.",
            )
        candidates[file] = {name: {row[name] for row in rows} for name in in_all}
    return candidates


def _is_of_splits(name: str, values: set[str]) -> bool:
    if is_column(name):
        return True
    spoken = {SPLIT_OF[word] for value in values for word in split_words(value)}
    return len(spoken) > 1 or (bool(spoken) and all(map(is_split_name, values)))


def check_columns(
    parts: Sequence[Part], columns: Mapping[str, str | None], files: Mapping[str, str], source: Path
) -> None:
    """Check that columns of splits contradict neither each other nor their files' names.

    Args:
        parts: What there is.
        columns: The column that counts in each file, or None.
        files: What `parts.choose_files` returned.
        source: The data set, for messages.

    Raises:
        SourceError: They do.
    """
    candidates = _candidates(parts, source)
    for part in parts:
        ours = candidates[part.file]
        said = [(name, value) for name, value in part.said if name in ours and _is_of_splits(name, ours[name])]
        if not said:
            continue
        name, value = said[0]
        splits = [{SPLIT_OF[word] for word in split_words(value)} for _, value in said]
        for (other, other_value), of_other in zip(said, splits, strict=True):
            if of_other != splits[0]:
                raise AmbiguousSplitError(
                    source,
                    f"has columns of splits that disagree: in {part.file} {name} is {value!r} where {other} is "
                    f"{other_value!r}",
                    f"say which counts, as --split train={name}=train --split val={name}=val",
                )
        of_file = {SPLIT_OF[word] for word in split_words(part.file)}
        if len(of_file) == 1 and of_file != splits[0] and (TRAIN in splits[0] or len(set(files.values())) > 1):
            raise AmbiguousSplitError(
                source,
                f"{part.file} has rows whose {name} is {value!r}",
                f"say what counts, the column with --split train={name}=train --split val={name}=val, or the files' "
                "names with --split train=FILE --split val=FILE",
            )
