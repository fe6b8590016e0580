"""Which split samples of tables and archives belong to: what a column, their file or their path says.

A column of splits (see `split_columns`) counts before the name of the file, and that before the folders in the samples'
paths (see `split_paths`). With `--split` each pattern names files; or, if it names none of several, values of a column;
or else paths.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..console import format_count
from ..errors import SettingError, SourceError
from ..splits import SPLIT_OF, TRAIN, AmbiguousSplitError, SplitRule, matches, split_words
from .listing import Listing
from .split_columns import Part, check_columns, column_value, columns_of_files
from .split_paths import Names, Paths, by_file_name, by_folder, may_speak

logger = logging.getLogger(__name__)

UNLABELLED = {"", "-1"}  # what test splits have in place of labels
NAMED = 3  # values that a message gives


@dataclass
class Listed:
    """Samples before they are divided.

    Attributes:
        parts: What they belong to.
        part: Integers[N], the number of each sample's part.
        labels: The label of each, as it is written; "": it has none.
        texts: Texts that hold every word of the samples' paths, to see quickly that none speaks of a split.
        paths: Gives their paths.
        unlabelled: Gives the error for a sample that must have a label and has none.
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
        names: Their paths below the source.
        listing: How to tell splits apart.
        source: The data set, for messages.
        may_wait: If it is not clear, leave it to `divide`, since the files may have columns.

    Returns:
        The split of each file that is read, "train", "val" or (if nothing is val) "test"; "": their names do not say.

    Raises:
        SourceError: What belongs to which split can be read in two ways.
    """
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
        files: What `choose_files` returned.
        listing: How to tell splits apart.
        source: The data set, for messages.

    Returns:
        int64[M], the samples of each split, "train" and "val", in their order.

    Raises:
        SourceError: What belongs to which split can be read in two ways, or samples have no labels.
        SettingError: The patterns do not fit what is there.
    """
    rule = listing.rule
    empty = files.keys() - {part.file for part in listed.parts}
    listed = replace(listed, parts=[*listed.parts, *(Part(file) for file in files if file in empty)])
    by_file = bool(files) and all(files.values())
    paths = None
    if rule.patterns:
        (names, number), rule = (_by_file(listed), rule) if by_file else _by_pattern(listed, rule, source)
    else:
        columns = columns_of_files(listed.parts, source)
        check_columns(listed.parts, columns, files, source)
        names, number = _by_part(listed, lambda part: column_value(part, columns[part.file]))
        by_file = by_file and not any(columns.values())
        is_said = any(map(split_words, names))
        if may_speak(listed.texts):
            at = listed.paths()
            paths = by_folder(at, listed.labels) or (None if is_said else by_file_name(at))
        if paths is not None and not is_said:
            names, number = paths
    bare = _unlabelled(listed, names, number)
    if by_file:
        raw: dict[str, list[str]] = {}
        for name in names:
            raw.setdefault(files[name], []).append(name)
    else:
        if not rule.patterns and not any(map(split_words, names)):
            rule.check_own_name(source)
        raw = rule.divide(names, source)
    splits = listing.choose(raw, [] if by_file else names, bare)
    place = {name: at for at, name in enumerate(names)}
    samples = {
        split: np.flatnonzero(np.isin(number, [place[name] for name in of_split])) for split, of_split in splits.items()
    }
    for split, of_split in samples.items():
        if not len(of_split):
            raise SourceError(f"split {split} holds no images", path=source)
        if "" in (labels := pick(listed.labels, of_split)):
            raise listed.unlabelled(int(of_split[labels.index("")]))
    if paths is not None and not rule.patterns and number is not paths[1]:
        said = {place[name]: split for split, of_split in raw.items() for name in of_split}
        _check_paths(listed, (names, number), said, paths, source)
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


def _by_part(listed: Listed, name_of: Callable[[Part], str]) -> Names:
    names: dict[str, int] = {}
    numbers = [names.setdefault(name_of(part), len(names)) for part in listed.parts]
    return list(names), np.array(numbers, np.int32)[listed.part]


def _by_file(listed: Listed) -> Names:
    return _by_part(listed, lambda part: part.file)


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
        names = _by_part(listed, partial(column_value, column=column))
        bare = [(split, _without(column, pattern)) for split, pattern in rule.patterns]
        if _covers(values := SplitRule(tuple(bare)), names[0]):
            fitting[column] = names, values
    divisions = [values.divide(names, source) for (names, _), values in fitting.values()]
    if any(division != divisions[0] for division in divisions):
        raise SettingError(
            f"split: the patterns fit several columns of {source}, {' and '.join(fitting)}: say which is meant, as "
            f"--split train={next(iter(fitting))}=PATTERN"
        )
    if fitting:
        return next(iter(fitting.values()))
    paths = list(map(os.path.normpath, listed.paths().joined()))
    distinct = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    if _covers(rule, list(distinct)):
        return (list(distinct), np.array([distinct[path] for path in paths], np.int32)), rule
    files = _by_file(listed)
    if _covers(rule, files[0]):
        return files, rule
    said = list(dict.fromkeys(f"{name}={value}" for part in listed.parts for name, value in part.said))
    everything = [*said, *(text.partition("=")[2] for text in said), *files[0], *distinct]
    wrong = next((pattern for _, pattern in rule.patterns if not _names_any(everything, pattern)), None)
    what = "the patterns name different things" if wrong is None else f"{wrong!r} names nothing"
    there = ", ".join([*said[:NAMED], *files[0][:NAMED], *paths[:NAMED]])
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
    if UNLABELLED.isdisjoint(listed.labels):
        return set()
    labelled = np.fromiter((label not in UNLABELLED for label in listed.labels), bool, len(listed.labels))
    having = set(np.unique(number[labelled]).tolist())
    return {name for at, name in enumerate(names) if at not in having}


def _check_paths(listed: Listed, chosen: Names, said: Mapping[int, str], paths: Names, source: Path) -> None:
    """Raise SourceError where samples of train lie in a folder of another split; warn of other contradictions."""
    names, number = chosen
    spoken = [{SPLIT_OF[word] for word in split_words(name)} for name in paths[0]]
    pairs = number.astype(np.int64) * len(spoken) + paths[1]
    distinct, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    for pair, i, count in zip(distinct.tolist(), first.tolist(), counts.tolist(), strict=True):
        name, place = divmod(pair, len(spoken))
        split = said.get(name)
        if split is None or len(spoken[place]) != 1 or split in spoken[place]:
            continue
        what = (
            f"{format_count(count, 'sample')} of {names[name]} {'lies' if count == 1 else 'lie'} in {paths[0][place]}"
        )
        example = listed.paths().joined()[i]
        if split == TRAIN:
            raise AmbiguousSplitError(
                source,
                f"{what}, such as {example}, so it is not clear whether they are for training",
                f"if they are, type --split train={shlex.quote(names[name])} and --split val=PATTERN for the others; "
                "if the folders are right, --split train=PATTERN and --split val=PATTERN of paths",
            )
        if len(set().union(*spoken)) > 1:
            logger.warning("%s: %s, such as %s: taken as what %s says", source, what, example, names[name])
