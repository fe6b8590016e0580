"""Which split samples of tables and archives belong to: what a column, their file or their path says.

A column of splits (see `split_columns`) counts before the name of the file, and that before the folders in the samples'
paths (see `split_paths`). With `--split` each pattern names files; or, if it names none of several, values of a column;
or else paths.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import SettingError, SourceError
from ..split_names import NAMED, TRAIN, VAL, matches, split_words, splits_of
from ..splits import AmbiguousSplitError, SplitRule
from .listing import Listing
from .shard_names import check_contents
from .split_columns import Part, Said, column_value
from .split_paths import Names, Paths, by_file_name, by_folder, check_paths, check_undivided, may_speak
from .split_table import SplitTable, filled

_UNLABELLED = {"", "-1"}  # what test splits have in place of labels


@dataclass
class Listed:
    """Samples before they are divided.

    Attributes:
        parts: Parts that the samples belong to.
        part: Number of each sample's part, integers[N].
        labels: The label of each, as it is written; "": it has none.
        texts: Texts that hold every word of the samples' paths, to see quickly that none speaks of a split.
        paths: Function that gives their paths.
        unlabelled: Function that gives the error for a sample that must have a label and has none.
    """

    parts: Sequence[Part]
    part: np.ndarray
    labels: Sequence[str]
    texts: Sequence[Sequence[str]]
    paths: Callable[[], Paths]
    unlabelled: Callable[[int], SourceError]


def join_files(
    files: Iterable[tuple[str, Sequence[str], Sequence[Said]]],
    paths: Sequence[str],
    unlabelled: Callable[[int, str], SourceError],
) -> Listed:
    """Return the samples of all files.

    Args:
        files: Each file's path below the source, its samples' labels, and what is said of each split; nothing: [].
        paths: The samples' paths in the files.
        unlabelled: Function that gives the error for a sample without a label, by its number, and its file.
    """
    parts: dict[Part, int] = {}
    part: list[int] = []
    labels: list[str] = []
    for file, of_file, said in files:
        labels += of_file
        part += [parts.setdefault(Part(file, its), len(parts)) for its in said or repeat((), len(of_file))]
    names = [file for file, _ in parts]
    numbers = np.array(part, np.int32)
    return Listed(
        list(parts), numbers, labels, [paths], lambda: Paths.from_texts(paths), lambda i: unlabelled(i, names[part[i]])
    )


def divide_samples(listed: Listed, files: Mapping[str, str], listing: Listing, source: Path) -> dict[str, np.ndarray]:
    """Return the samples of each split, "train" and "val", in their order, int64[M].

    Args:
        listed: The samples.
        files: Split of each file, as `choose_files` returned it.
        listing: Listing with the rule that tells splits apart.
        source: The data set, for messages.

    Raises:
        SourceError: It can be read in two ways what belongs to which split, or samples have no labels.
        SettingError: The patterns do not fit what is there.
    """
    empty = files.keys() - {part.file for part in listed.parts}
    listed = replace(listed, parts=filled([*listed.parts, *(Part(file) for file in files if file in empty)]))
    divide_names = _divide_as_typed if listing.rule.patterns else _divide_as_said
    (names, number, typed), named, table, paths = divide_names(listed, files, listing.rule, source)
    place = {name: at for at, name in enumerate(names)}

    def left_out(name: str) -> Iterable[str]:
        return [name] if name in files else _samples(listed, np.flatnonzero(number == place[name]))

    splits = listing.choose(named, names, _unlabelled(listed, names, number), left_out=left_out)
    samples = {
        split: np.flatnonzero(np.isin(number, [place[name] for name in of_split])) for split, of_split in splits.items()
    }
    _check_labels(listed, samples, source)
    if paths is not None:
        said = {name: split for split, of_split in named.items() for name in of_split}
        check_paths(Names(names, number, typed), said, paths, listed.paths, source)
    check_contents({name: files[name] for name in files if name not in empty}, source, bool(listing.rule.patterns))
    if table is not None:
        table.report(len(samples.get(TRAIN, ())), len(samples.get(VAL, ())))
    return samples


class _Division(NamedTuple):
    """What the samples are divided by, and the names of each split."""

    chosen: Names
    splits: Mapping[str, list[str]]
    table: SplitTable | None = None  # of columns
    paths: Names | None = None  # what the samples' paths say, if something else divides them


def _divide_as_typed(listed: Listed, files: Mapping[str, str], rule: SplitRule, source: Path) -> _Division:
    """Divide samples by what `--split` names."""
    if files and all(files.values()):
        names = _by_file(listed)
        return _Division(names, _by_split(names.names, files))
    names, rule = _by_pattern(listed, rule, source)
    return _Division(names, rule.divide(names.names, source, names.typed))


def _divide_as_said(listed: Listed, files: Mapping[str, str], rule: SplitRule, source: Path) -> _Division:
    """Divide samples by what columns, files' names or paths say."""
    table = SplitTable(listed.parts, source, partial(_labels_of, listed))
    table.check_files(files)
    chosen = _by_name(listed, table.names, table.typed)
    is_said = any(map(split_words, chosen.names))
    paths = None
    if may_speak(listed.texts):
        at = listed.paths()
        paths = by_folder(at, listed.labels) or (None if is_said else by_file_name(at))
    if paths is not None and not is_said:
        chosen, paths = paths, None
    table.check_rest(len(set().union(*map(splits_of, chosen.names))))
    if files and all(files.values()) and not table.columns:
        return _Division(chosen, _by_split(chosen.names, files), table, paths)
    if not any(map(split_words, chosen.names)):
        check_undivided(chosen.names, listed.paths(), listed.labels, source)
        rule.check_own_name(source)
    try:
        return _Division(chosen, rule.divide(chosen.names, source, chosen.typed), table, paths)
    except AmbiguousSplitError as error:
        raise table.refusal(error) from None


def _by_split(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(files[name], []).append(name)
    return splits


def _check_labels(listed: Listed, samples: Mapping[str, np.ndarray], source: Path) -> None:
    """Raise SourceError for a split without samples, or a sample without a label."""
    if not samples and "" in listed.labels:  # all of it is a test split
        raise listed.unlabelled(listed.labels.index(""))
    for split, of_split in samples.items():
        if not len(of_split):
            raise SourceError(f"split {split} holds no images", path=source)
        if "" in (labels := pick(listed.labels, of_split)):
            raise listed.unlabelled(int(of_split[labels.index("")]))


def pick(values: Sequence[str], samples: np.ndarray) -> Sequence[str]:
    """Pick the values of some samples, int64[M], given in their order: in no time if they are one run."""
    if not len(samples):
        return []
    first, last = int(samples[0]), int(samples[-1]) + 1
    if last - first == len(samples):
        return values if len(samples) == len(values) else values[first:last]
    return [values[i] for i in samples.tolist()]


# --- what says it -----------------------------------------------------------------------------------


def _by_name(listed: Listed, names_of_parts: Iterable[str], typed: Mapping[str, Sequence[str]] | None = None) -> Names:
    of_parts = Names.from_texts(names_of_parts, lambda name: (typed or {}).get(name, [name]))
    return of_parts._replace(number=of_parts.number[listed.part])


def _by_file(listed: Listed) -> Names:
    return _by_name(listed, (part.file for part in listed.parts))


def _labels_of(listed: Listed, parts: Collection[int]) -> set[str]:
    """Return the labels in some parts, given by their numbers."""
    return {listed.labels[i] for i in np.flatnonzero(np.isin(listed.part, list(parts))).tolist()}


def _samples(listed: Listed, samples: np.ndarray) -> Iterator[str]:
    """Name samples, int64[M], by their files and paths, or places in them."""
    paths = listed.paths().joined()
    first: dict[str, int] = {}
    for i, part in enumerate(listed.part.tolist()):
        first.setdefault(listed.parts[part].file, i)
    for i in samples.tolist():
        file = listed.parts[listed.part[i]].file
        yield f"{file}: {paths[i] or f'row {i - first[file]}'}"


def _by_pattern(listed: Listed, rule: SplitRule, source: Path) -> tuple[Names, SplitRule]:
    """Name samples by what the patterns name: values of a column, paths, or files.

    Returns the names, and the patterns without `COLUMN=`. Raises SettingError if the patterns name nothing, or
    different things, or values of several columns.
    """
    if all(pattern == "." for _, pattern in rule.patterns):
        return _by_file(listed), rule
    columns = dict.fromkeys(name for part in listed.parts for name, _ in part.said)
    fitting: dict[str, tuple[Names, SplitRule]] = {}
    for column in columns:
        names = _by_name(listed, (column_value(part, column) for part in listed.parts))
        bare = [(split, _without(column, pattern)) for split, pattern in rule.patterns]
        if (values := SplitRule(tuple(bare))).covers(names.names):
            fitting[column] = names, values
    divisions = []
    for (distinct_values, number, _), values in fitting.values():
        split_of = {
            name: split for split, of_split in values.divide(distinct_values, source).items() for name in of_split
        }
        divisions.append(np.array([split_of.get(name, "") for name in distinct_values])[number])
    if not all(np.array_equal(division, divisions[0]) for division in divisions):
        column = next(iter(fitting))
        typed = (f"{split}={column}={_without(column, pattern)}" for split, pattern in rule.patterns)
        raise SettingError(
            f"split: the patterns fit several columns of {source}, {' and '.join(fitting)}: say which is meant, as "
            + " ".join(f"--split {shlex.quote(text)}" for text in typed)
        )
    if fitting:
        return next(iter(fitting.values()))
    paths = list(map(os.path.normpath, listed.paths().joined()))
    by_path = Names.from_texts(paths)
    if rule.covers(by_path.names):
        return by_path, rule
    files = _by_file(listed)
    if rule.covers(files.names):
        return files, rule
    said = list(dict.fromkeys(f"{name}={value}" for part in listed.parts for name, value in part.said if value))
    everything = [*said, *(text.partition("=")[2] for text in said), *files.names, *by_path.names]
    wrong = next(
        (pattern for _, pattern in rule.patterns if not any(matches(name, pattern) for name in everything)), None
    )
    what = "the patterns name different things" if wrong is None else f"{wrong!r} names nothing"
    there = ", ".join([*said[:NAMED], *files.names[:NAMED], *paths[:NAMED]])
    raise SettingError(
        f"split: {what} in {source}; there is {there}: each pattern must name files, or each values of one column, or "
        "each paths"
    )


def _without(column: str, pattern: str) -> str:
    """Return the pattern of values in `column=pattern`; other patterns as they are."""
    named, equals, values = pattern.partition("=")
    return values if equals and values and named.lower() == column.lower() else pattern


# --- what does not fit ------------------------------------------------------------------------------


def _unlabelled(listed: Listed, names: Sequence[str], number: np.ndarray) -> set[str]:
    """Return the names none of whose samples has a label."""
    if _UNLABELLED.isdisjoint(listed.labels):
        return set()
    labelled = np.fromiter((label not in _UNLABELLED for label in listed.labels), bool, len(listed.labels))
    having = set(np.unique(number[labelled]).tolist())
    return {name for at, name in enumerate(names) if at not in having}
