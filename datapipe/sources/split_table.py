"""What the columns of a data set say of splits, taken together.

A column that is called as one of splits, or whatever its name, divides the samples if each value names a split; without
such a name it must name several. So do columns that are called as `is_valid`, of truths. Where some values name splits
and others do not, the column can be read in two ways. Other columns are let be, except where nothing else divides the
samples: then those that are called as columns of splits are refused, and those that name val in each row.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..split_names import (
    NAMED,
    TEST,
    TRAIN,
    VAL,
    is_split_name,
    mean_splits,
    options_of,
    pure_splits,
    short_splits,
    split_options,
    splits_of,
)
from ..splits import AmbiguousSplitError, VariantsError
from .split_columns import BESIDE, TRUTH, Part, flag_split, is_column

logger = logging.getLogger(__name__)

_MAX_TEXT = 60  # characters of a value that a message gives
_WORDS, _FLAG, _MIXED, _UNCLEAR, _NOTHING = "words", "flag", "mixed", "unclear", "nothing"  # what a column may be
_REST = "(the rest is left out)"
_WHOLE = "--split train=. if all are for training"
_EITHER = f"type {_WHOLE}, or --split val=. if all are for validation"


def filled(parts: Sequence[Part]) -> list[Part]:
    """Give each part all columns of its file: "" for those that it lacks."""
    columns: dict[str, dict[str, str]] = {}
    for part in parts:
        columns.setdefault(part.file, {}).update((name, "") for name, _ in part.said)
    return [Part(part.file, tuple({**columns[part.file], **dict(part.said)}.items())) for part in parts]


class SplitTable:
    """What the columns of a data set's parts say of splits.

    Attributes:
        names: Name of each part: the value that says its split, or else its file.
        columns: Columns whose values say the splits.
        typed: Texts by which `--split` names the samples of each name that is a value, in each spelling.
    """

    def __init__(self, parts: Sequence[Part], source: Path, labels_of: Callable[[Collection[int]], set[str]]) -> None:
        """Find the columns that say the splits of parts, which `filled` returned.

        `labels_of` gives the labels in some parts, by their numbers. Raises AmbiguousSplitError if a column can be read
        in two ways, or two disagree.
        """
        self._source = source
        self._parts = parts
        self._rows = [dict(part.said) for part in parts]
        self._values: dict[str, dict[str, None]] = {}
        for row in self._rows:
            for name, value in row.items():
                self._values.setdefault(name, {})[value] = None
        self._kinds = {name: _kind(name, values) for name, values in self._values.items()}
        of_words = [name for name, kind in self._kinds.items() if kind == _WORDS]
        flags = [] if of_words else [name for name, kind in self._kinds.items() if kind == _FLAG]
        self.columns = [*of_words, *flags]
        for name in self._of_kind(_MIXED):
            if is_column(name) or (not self.columns and not self._is_of_classes(name, labels_of)):
                raise self._refusal(name)
        self.names: list[str] = []
        self.typed: dict[str, list[str]] = {}
        first: dict[str, str] = {}  # by name in lower case
        for part, row in zip(parts, self._rows, strict=True):
            column = self._column(row)
            if column is None:
                self.names.append(part.file)
                continue
            name = self._name(column, row)
            self.names.append(first.setdefault(name.lower(), name))
            if column in of_words or len(flags) == 1:
                texts = self.typed.setdefault(self.names[-1], [])
                texts += [text for text in [f"{column}={row[column]}"] if text not in texts]
            self._check_row(part, row, column)

    def report(self, num_train: int, num_val: int) -> None:
        """Log which columns said the splits. Raises AmbiguousSplitError if one of truths says val of most samples."""
        if self.columns:
            if 0 < num_train < num_val and _FLAG in map(self._kinds.__getitem__, self.columns):
                why = f"it would make {num_val} samples of val and {num_train} of train, so it may say what is good"
                raise self.refusal(AmbiguousSplitError(self._source, why, ""))
            texts = [f"{name} (true: {flag_split(name, ())})" * (self._kinds[name] == _FLAG) for name in self.columns]
            names = " and ".join(text or name for text, name in zip(texts, self.columns, strict=True))
            logger.info("%s: the splits are taken from %s", self._source, names)

    def check_files(self, files: Mapping[str, str]) -> None:
        """Raise AmbiguousSplitError if columns contradict the files' names; `files`: from `choose_files`."""
        for part, row, name in zip(self._parts, self._rows, self.names, strict=True):
            column = self._column(row)
            by_name, said = splits_of(part.file), splits_of(name)
            if column is None or len(by_name) != 1 or by_name == said:
                continue
            if TRAIN in said or len(set(files.values())) > 1:
                raise AmbiguousSplitError(
                    self._source,
                    f"{part.file} has rows whose {column} is {row[column]!r}",
                    f"if {column} counts, {self._advise(column)}; if the files' names do, type {options_of(files)}",
                )

    def check_rest(self, num_splits: int) -> None:
        """Check that no column that was let be may divide the samples, which names of `num_splits` splits do, too.

        Raises AmbiguousSplitError if one may: with several splits none, with one those of several values.
        """
        for name in self._of_kind(_UNCLEAR):
            values = self._values[name]
            if not num_splits or (num_splits == 1 and len(values) > 1 and not all(map(splits_of, values))):
                raise self._refusal(name)

    def refusal(self, error: AmbiguousSplitError) -> AmbiguousSplitError:
        """Say of the column that divides what cannot be divided by its values."""
        if not self.columns or not set(self.names) <= self.typed.keys():
            return error
        why = f"{' and '.join(self.columns)}: {error.why}"
        if isinstance(error, VariantsError):
            return VariantsError(self._source, why, error.variants, error.choices, error.joined)
        return AmbiguousSplitError(self._source, why, self._advise_or_all(self.columns[0]))

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name, of_name in self._kinds.items() if of_name == kind]

    def _column(self, row: Mapping[str, str]) -> str | None:
        """Return the column that says a row's split; None: its file has none."""
        return next((name for name in self.columns if name in row), None)

    def _name(self, column: str, row: Mapping[str, str]) -> str:
        """Name a row's split; of flags, what none claims is of the first split that has no flag."""
        if self._kinds[column] == _WORDS:
            return row[column]
        flags = {name: flag_split(name, ()) or "" for name in self.columns if name in row}
        claimed = {split for name, split in flags.items() if TRUTH[row[name].lower()]}
        rest = [split for split in (TRAIN, VAL, TEST) if split not in flags.values()]
        if len(claimed) == 1 or (not claimed and rest):
            return claimed.pop() if claimed else rest[0]
        said = " and ".join(f"{name} is {row[name]}" for name in flags)
        advice = "; ".join(f"if {name} counts, {self._advise(name)}" for name in flags)
        raise AmbiguousSplitError(self._source, f"has rows whose {said}", advice)

    def _is_of_classes(self, column: str, labels_of: Callable[[Collection[int]], set[str]]) -> bool:
        """Whether `train` in a column, beside other things, may be the vehicle: it goes with a label of its own."""
        if pure_splits(self._values[column]) != {TRAIN}:
            return False
        inside = {i for i, row in enumerate(self._rows) if is_split_name(row.get(column, ""))}
        labels = labels_of(inside)
        others = labels_of({i for i, row in enumerate(self._rows) if column in row} - inside)
        return len(labels) == 1 and labels.isdisjoint(others)

    def _check_row(self, part: Part, row: Mapping[str, str], column: str) -> None:
        """Raise AmbiguousSplitError if another column of splits disagrees with the one that counts."""
        name = self._name(column, row)
        for other, value in row.items():
            splits = splits_of(value) if self._kinds[other] == _WORDS else set()
            flag = flag_split(other, (value,)) if self._kinds[other] == _FLAG else None
            if (splits and splits != splits_of(name)) or (flag and TRUTH[value.lower()] != (splits_of(name) == {flag})):
                raise AmbiguousSplitError(
                    self._source,
                    f"has columns of splits that disagree: in {part.file} {column} is {row[column]!r} where {other} "
                    f"is {value!r}",
                    f"if {column} counts, {self._advise(column)}; if {other} counts, {self._advise(other)}",
                )

    def _refusal(self, column: str) -> AmbiguousSplitError:
        values = list(self._values[column])
        silent = [value for value in values if not splits_of(value)] if len(values) > 1 else []
        why = f"{column} is {_some(values)}, and nothing else says the splits"
        if silent:
            names = "names" if len(silent) == 1 else "name"
            why = f"{column} is {_some(values)}, and {_some(silent)} {names} no split that datapipe knows"
        return AmbiguousSplitError(self._source, why, self._advise_or_all(column) if silent else _EITHER)

    def _advise_or_all(self, column: str) -> str:
        return f"{self._advise(column)}, or {_WHOLE}" if len(self._values[column]) > 1 else _EITHER

    def _advise(self, column: str) -> str:
        return _advise(column, list(self._values[column]))


def _kind(name: str, values: Collection[str]) -> str:
    filled_in = [value for value in values if value]
    pure = pure_splits(values)
    spoken = {split for value in values for split in splits_of(value)}
    if not filled_in:
        return _NOTHING
    if all(map(splits_of, values)):
        if is_column(name) or len(spoken) > 1:
            return _WORDS
        return _UNCLEAR if pure - {TRAIN} else _NOTHING
    if BESIDE.search(name) and (split := flag_split(name, values)):
        leaves_train = any(TRUTH[value.lower()] == (split == TRAIN) for value in values)
        return _FLAG if leaves_train else _UNCLEAR
    if pure and (is_column(name) or len(pure) > 1 or pure == {TRAIN}):
        return _MIXED
    return _UNCLEAR if pure or is_column(name) or mean_splits(filled_in) else _NOTHING


def _some(values: Iterable[str]) -> str:
    texts = [repr(value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…") for value in values]
    if len(texts) > NAMED + 1:
        texts = [*texts[:NAMED], f"{len(texts) - NAMED} others"]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _advise(column: str, values: Sequence[str]) -> str:
    """Say what to type to divide by a column."""
    groups: dict[str, list[str]] = {TRAIN: [], VAL: [], TEST: []}
    flag = flag_split(column, values)
    others = []
    for value in values:
        splits = splits_of(value) or set(short_splits(value))
        if flag:
            splits = {flag if TRUTH[value.lower()] else VAL if flag == TRAIN else TRAIN}
        if len(splits) == 1:
            groups[splits.pop()].append(value)
        else:
            others.append(value)
    train, val = sorted(groups[TRAIN], key=len), sorted(groups[VAL] or groups[TEST], key=len)
    if len(values) == 1:
        return f"type --split {TRAIN if train else VAL}=." if train or val else _EITHER
    if not train and not val:
        first, second = ([value] for value in others[:2])
        options = _of_values(column, first, second)
        if len(others) == 2:
            return f"type {options}, or {_of_values(column, second, first)}"
        return f"say which of its values are which, such as {options} {_REST}"
    options = _of_values(column, train or others[:1], val)
    if train and others and not val:
        return f"type {options} {_REST}, with {_of_values(column, [], others)} if that is for validation"
    return f"type {options} {_REST}"


def _of_values(column: str, train: Sequence[str], val: Sequence[str]) -> str:
    """Return `--split` options of a column's values: of each split the first, and those that differ in case."""
    groups = {
        split: [f"{column}={value}" for value in values if value.lower() == values[0].lower()]
        for split, values in ((TRAIN, train), (VAL, val))
    }
    name = shlex.quote(column)
    return split_options(groups, []) or f"--split train={name}=PATTERN --split val={name}=PATTERN"
