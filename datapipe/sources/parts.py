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
from pathlib import Path

import numpy as np

from ..errors import SettingError, SourceError
from ..split_names import TRAIN, VAL, matches, split_words, splits_of
from ..splits import AmbiguousSplitError, SplitRule
from .listing import Listing
from .shard_names import check_contents, check_copies, check_names
from .split_columns import Part, column_value
from .split_paths import Names, Paths, by_file_name, by_folder, check_paths, check_undivided, may_speak
from .split_table import SplitTable, filled

_UNLABELLED = {"", "-1"}  # what test splits have in place of labels
_NAMED = 3  # values that a message gives


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


def choose_files(names: Sequence[str], listing: Listing, source: Path, may_wait: bool = True) -> dict[str, str]:
    """Choose which files of a data set are read, where their names say it.

    Args:
        names: Paths of the files below the source.
        listing: Listing with the rule that tells splits apart.
        source: The data set, for messages.
        may_wait: Whether to leave it to `divide` if it is not clear, since the files may have columns.

    Returns:
        The split of each file that is read, "train", "val" or (if nothing is val) "test"; "": their names do not say.

    Raises:
        SourceError: It can be read in two ways what belongs to which split.
    """
    if listing.rule.patterns:
        return _choose_files(names, listing, source, may_wait)
    check_copies(names, source)
    files = _choose_files(names, listing, source, may_wait)
    check_names(files, source)
    return files


def _choose_files(names: Sequence[str], listing: Listing, source: Path, may_wait: bool) -> dict[str, str]:
    rule = listing.rule
    if rule.patterns:
        if len(names) < 2 or not _covers(rule, names):
            return dict.fromkeys(names, "")
    elif not any(map(split_words, names)) and may_wait:
        return dict.fromkeys(names, "")
    try:
        splits = listing.choose(rule.divide(names, source), names, keep_test=True)
    except AmbiguousSplitError:
        if may_wait:
            return dict.fromkeys(names, "")
        raise
    is_said = rule.patterns or any(map(split_words, names))
    split_of = {name: split if is_said else "" for split, of_split in splits.items() for name in of_split}
    return {name: split_of[name] for name in names if name in split_of}


def divide(listed: Listed, files: Mapping[str, str], listing: Listing, source: Path) -> dict[str, np.ndarray]:
    """Divide samples by split.

    Args:
        listed: The samples.
        files: Split of each file, as `choose_files` returned it.
        listing: Listing with the rule that tells splits apart.
        source: The data set, for messages.

    Returns:
        The samples of each split, "train" and "val", in their order, int64[M].

    Raises:
        SourceError: It can be read in two ways what belongs to which split, or samples have no labels.
        SettingError: The patterns do not fit what is there.
    """
    rule = listing.rule
    empty = files.keys() - {part.file for part in listed.parts}
    listed = replace(listed, parts=filled([*listed.parts, *(Part(file) for file in files if file in empty)]))
    by_file = bool(files) and all(files.values())
    paths = table = None
    if rule.patterns:
        (names, number, typed), rule = (_by_file(listed), rule) if by_file else _by_pattern(listed, rule, source)
    else:
        table = SplitTable(listed.parts, source, partial(_labels_of, listed))
        table.check_files(files)
        names, number, typed = _by_name(listed, table.names, table.typed)
        by_file = by_file and not table.columns
        is_said = any(map(split_words, names))
        if may_speak(listed.texts):
            at = listed.paths()
            paths = by_folder(at, listed.labels) or (None if is_said else by_file_name(at))
        if paths is not None and not is_said:
            names, number, typed = paths
        table.check_rest(len(set().union(*map(splits_of, names))))
    bare = _unlabelled(listed, names, number)
    if by_file:
        raw: dict[str, list[str]] = {}
        for name in names:
            raw.setdefault(files[name], []).append(name)
    else:
        if not rule.patterns and not any(map(split_words, names)):
            check_undivided(names, listed.paths(), listed.labels, source)
            rule.check_own_name(source)
        try:
            raw = rule.divide(names, source, typed)
        except AmbiguousSplitError as error:
            raise (table.refusal(error) if table is not None else error) from None
    place = {name: at for at, name in enumerate(names)}

    def left_out(name: str) -> Iterable[str]:
        return [name] if name in files else _samples(listed, np.flatnonzero(number == place[name]))

    splits = listing.choose(raw, [] if by_file else names, bare, left_out=left_out)
    samples = {
        split: np.flatnonzero(np.isin(number, [place[name] for name in of_split])) for split, of_split in splits.items()
    }
    if not samples and "" in listed.labels:  # all of it is a test split
        raise listed.unlabelled(listed.labels.index(""))
    for split, of_split in samples.items():
        if not len(of_split):
            raise SourceError(f"split {split} holds no images", path=source)
        if "" in (labels := pick(listed.labels, of_split)):
            raise listed.unlabelled(int(of_split[labels.index("")]))
    if table is not None and paths is not None and number is not paths.number:
        said = {name: split for split, of_split in raw.items() for name in of_split}
        check_paths(Names(names, number, typed), said, paths, listed.paths, source)
    check_contents({name: files[name] for name in files if name not in empty}, source, bool(listing.rule.patterns))
    if table is not None:
        table.report(len(samples.get(TRAIN, ())), len(samples.get(VAL, ())))
    return samples


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
    names: dict[str, int] = {}
    numbers = [names.setdefault(name, len(names)) for name in names_of_parts]
    return Names(list(names), np.array(numbers, np.int32)[listed.part], lambda name: (typed or {}).get(name, [name]))


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

    Returns:
        The names, and the patterns without `COLUMN=`.

    Raises:
        SettingError: The patterns name nothing, or different things, or values of several columns.
    """
    if all(pattern == "." for _, pattern in rule.patterns):
        return _by_file(listed), rule
    columns = dict.fromkeys(name for part in listed.parts for name, _ in part.said)
    fitting: dict[str, tuple[Names, SplitRule]] = {}
    for column in columns:
        names = _by_name(listed, (column_value(part, column) for part in listed.parts))
        bare = [(split, _without(column, pattern)) for split, pattern in rule.patterns]
        if _covers(values := SplitRule(tuple(bare)), names.names):
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
    distinct = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    if _covers(rule, list(distinct)):
        return Names(list(distinct), np.array([distinct[path] for path in paths], np.int32)), rule
    files = _by_file(listed)
    if _covers(rule, files.names):
        return files, rule
    said = list(dict.fromkeys(f"{name}={value}" for part in listed.parts for name, value in part.said if value))
    everything = [*said, *(text.partition("=")[2] for text in said), *files.names, *distinct]
    wrong = next((pattern for _, pattern in rule.patterns if not _names_any(everything, pattern)), None)
    what = "the patterns name different things" if wrong is None else f"{wrong!r} names nothing"
    there = ", ".join([*said[:_NAMED], *files.names[:_NAMED], *paths[:_NAMED]])
    raise SettingError(
        f"split: {what} in {source}; there is {there}: each pattern must name files, or each values of one column, or "
        "each paths"
    )


def _without(column: str, pattern: str) -> str:
    """Return the pattern of values in `column=pattern`; other patterns as they are."""
    named, equals, values = pattern.partition("=")
    return values if equals and values and named.lower() == column.lower() else pattern


def _covers(rule: SplitRule, names: Sequence[str]) -> bool:
    """Whether each pattern names one of the names at least."""
    return all(_names_any(names, pattern) for _, pattern in rule.patterns)


def _names_any(names: Sequence[str], pattern: str) -> bool:
    return any(matches(name, pattern) for name in names)


# --- what does not fit ------------------------------------------------------------------------------


def _unlabelled(listed: Listed, names: Sequence[str], number: np.ndarray) -> set[str]:
    """Return the names none of whose samples has a label."""
    if _UNLABELLED.isdisjoint(listed.labels):
        return set()
    labelled = np.fromiter((label not in _UNLABELLED for label in listed.labels), bool, len(listed.labels))
    having = set(np.unique(number[labelled]).tolist())
    return {name for at, name in enumerate(names) if at not in having}
