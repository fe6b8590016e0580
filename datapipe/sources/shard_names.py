"""The tars or tables of a data set: which are read, and what their names say of each other.

Folds, sets from which shards are missing, and copies of a file are refused, unless `--split` says what to take.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..console import format_count
from ..split_names import FOLD, HASH, NAMED, TRAIN, VAL, matches, named_options, split_options, split_words, splits_of
from ..splits import CHOOSE, AmbiguousSplitError
from .listing import Listing

logger = logging.getLogger(__name__)

# What browsers, file managers and people add to the name of a copy.
_COPY = re.compile(
    r"(?i)^(copy of|kopie von|copie de|copia de)[ _]"
    r"|[ _]*\(([0-9]+|[^()]*\b(copy|kopie|copie|copia)\b[^()]*)\)"
    r"|[ _.-]+(copy|kopie|copie|copia)([ _-]?[0-9]+)?(?![a-z0-9])"
)
_NUMBER_OF = re.compile("(?i)(?<![0-9])([0-9]+)[-_ ]?of[-_ ]?([0-9]+)(?![0-9])")  # as in train-00000-of-00294.parquet
_LAST_NUMBER = re.compile("[0-9]+(?=[^0-9]*$)")
_READ_BYTES = (1 << 12, 1 << 20)  # of both ends of files of equal size: more where the first are equal


def choose_files(names: Sequence[str], listing: Listing, source: Path, may_wait: bool = True) -> dict[str, str]:
    """Choose which files of a data set are read, where their names say it.

    Args:
        names: Paths of the files below the source.
        listing: Listing with the rule that tells splits apart.
        source: The data set, for messages.
        may_wait: Whether to leave it to `divide_samples` if it is not clear, since the files may have columns.

    Returns:
        The split of each file that is read, "train", "val" or (if nothing is val) "test"; "": their names do not say.
    """
    if listing.rule.patterns:
        return _choose_files(names, listing, source, may_wait)
    _check_copies(names, source)
    files = _choose_files(names, listing, source, may_wait)
    _check_names(files, source)
    return files


def _choose_files(names: Sequence[str], listing: Listing, source: Path, may_wait: bool) -> dict[str, str]:
    rule = listing.rule
    if rule.patterns:
        if len(names) < 2 or not rule.covers(names):
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


def _check_copies(names: Sequence[str], source: Path) -> None:
    """Raise AmbiguousSplitError if a file is called as a copy of another: of names below the source."""
    for name in names:
        folder, file = os.path.split(name)
        original = os.path.join(folder, _COPY.sub("", file).strip())
        if original != name and original in names:
            raise _twice(original, name, "are called as a file and its copy", dict.fromkeys(names, ""), source)


def _check_names(files: Mapping[str, str], source: Path) -> None:
    """Check what the names of files below the source, given with their splits ("": not known), say of each other.

    Raises AmbiguousSplitError if they are folds, or shards are missing.
    """
    if not any(map(split_words, files)):
        check_folds(list(files), source)
    _check_numbers(files, source)
    _tell_gaps(files, source)


def check_contents(files: Mapping[str, str], source: Path, is_said: bool) -> None:
    """Raise AmbiguousSplitError if two files of a split hold the same bytes: 1 MiB at each of their ends is compared.

    Args:
        files: The files that hold samples, by their paths below the source, and the split of each.
        source: The data set.
        is_said: Whether the user has said which to take: then a warning is enough, as for files of two splits.
    """
    for alike in _alike(list(files), source):
        first, second, *_ = sorted(alike, key=lambda name: (len(name), name))
        if is_said or len({files[name] for name in alike}) == len(alike):
            logger.warning("%s: %s and %s hold the same bytes, so each image is there twice", source, first, second)
        else:
            raise _twice(first, second, "hold the same bytes", files, source)


def _twice(first: str, second: str, why: str, files: Mapping[str, str], source: Path) -> AmbiguousSplitError:
    options = _options({name: split for name, split in files.items() if name != second}, [second])
    remove = f"remove one, or type {options}" if options else f"remove one, or {CHOOSE}"
    advice = f"{remove}; to take both, {_options(files, []) or 'name them with --split'}"
    return AmbiguousSplitError(
        source, f"{first} and {second} {why}, so each of their images would be there twice", advice
    )


def _options(files: Mapping[str, str], others: Sequence[str]) -> str:
    """Return `--split` options that name files by their splits, and no others; "" where few patterns do not."""
    groups: dict[str, list[str]] = {TRAIN: [], VAL: []}
    for name, split in files.items():
        by_name = splits_of(os.path.basename(name))
        is_val = split not in ("", TRAIN) or (not split and by_name and TRAIN not in by_name)
        groups[VAL if is_val else TRAIN].append(name)
    return "--split train=." if not others and not groups[VAL] else split_options(groups, others)


# --- folds and shards -------------------------------------------------------------------------------


def check_folds(names: Sequence[str], source: Path) -> None:
    """Raise AmbiguousSplitError if files, or folders in paths, are called as several folds."""
    folds: dict[int, list[str]] = {}
    for name in names:
        if match := FOLD.search(name):
            folds.setdefault(int(match[1]), []).append(name)
    if len(folds) < 2:
        return
    first = min(folds)
    val = _fold_patterns(folds[first])
    train = _fold_patterns([name for fold in sorted(folds) if fold != first for name in folds[fold]])
    is_divided = not any(matches(name, text) for name in folds[first] for text in train)
    options = named_options({TRAIN: train, VAL: val}) if is_divided else ""
    raise AmbiguousSplitError(
        source,
        f"holds folds {', '.join(map(str, sorted(folds)))}",
        (f"type {options} to validate with fold {first}" if options else CHOOSE)
        + ", or --split train=. if all are for training",
    )


def _fold_patterns(names: Sequence[str]) -> list[str]:
    """Return patterns of files of folds that name no other fold, such as `fold[1-4].tar`."""
    digits: dict[tuple[str, str], set[str]] = {}
    for name in names:
        match = FOLD.search(name)
        assert match is not None
        before, after = glob.escape(name[: match.end(1) - 1]), glob.escape(name[match.end(1) :])
        digits.setdefault((before, re.sub("[0-9]+", "*", after)), set()).add(name[match.end(1) - 1])
    patterns = []
    for (before, after), its in digits.items():
        low, high = min(its), max(its)
        is_run = len(its) > 2 and int(high) - int(low) + 1 == len(its)
        any_of = low if len(its) == 1 else f"[{low}-{high}]" if is_run else f"[{''.join(sorted(its))}]"
        patterns.append(before + any_of + after)
    return patterns


class _Shard(NamedTuple):
    """What a name such as `data/train-00000-of-00294.parquet` says."""

    stem: str  # all before the number
    number: int
    total: int
    text: str  # `00000-of-00294`

    @classmethod
    def parse(cls, name: str) -> _Shard | None:
        match = _NUMBER_OF.search(name, name.rfind("/") + 1)
        if match is None or int(match[1]) > int(match[2]):
            return None
        return cls(name[: match.start()], int(match[1]), int(match[2]), match[0])

    def sibling(self, number: int) -> str:
        """Return the stem and text of another shard of the set."""
        width = re.match("[0-9]+", self.text)
        assert width is not None
        return f"{self.stem}{number:0{width.end()}}{self.text[width.end() :]}"


def _check_numbers(files: Mapping[str, str], source: Path) -> None:
    """Raise AmbiguousSplitError unless all files of a set are there, and once, whose names say how many there are."""
    sets: dict[str, dict[int, dict[int, str]]] = {}  # names, by stem, count and number
    shards = {name: shard for name in files if (shard := _Shard.parse(name)) is not None}
    for name, shard in shards.items():
        of_stem = sets.setdefault(shard.stem, {})
        first = of_stem.setdefault(shard.total, {}).setdefault(shard.number, name)
        other = next((next(iter(names.values())) for count, names in of_stem.items() if count != shard.total), first)
        if other != name:
            readings = [
                _options({file: files[file] for file in files if file not in old}, old)
                for count in (shards[other].total, shard.total)
                for old in [[file for file, its in shards.items() if its.stem == shard.stem and its.total != count]]
            ]
            advice = f"remove those that are old, or {CHOOSE}"
            if other != first and all(readings):
                advice = f"if those like {other} count, type {readings[0]}; if those like {name} do, type {readings[1]}"
            why = f"{other} and {name} are shards of two versions, by their names"
            raise AmbiguousSplitError(source, why, advice)
    for of_stem in sets.values():
        ((count, names),) = of_stem.items()
        if num_missing := count - len(names):
            start = 1 if count in names else 0
            missing = (number for number in range(start, count + start) if number not in names)
            example = shards[next(iter(names.values()))]
            texts = ", ".join(map(example.sibling, islice(missing, NAMED)))
            more = f" and {format_count(num_missing - NAMED, 'other')}" if num_missing > NAMED else ""
            why = f"{texts}{more} {'is' if num_missing == 1 else 'are'} missing, by the names of the others"
            options = _options(files, []) or "--split with patterns of the others"
            raise AmbiguousSplitError(source, why, f"put the whole set there, or type {options} to do without")


def _tell_gaps(names: Iterable[str], source: Path) -> None:
    """Warn of numbers that are missing between those of files called alike, such as 0.tar, 1.tar and 3.tar."""
    series: dict[str, set[int]] = {}
    for name in names:
        if (match := _LAST_NUMBER.search(name)) and not _NUMBER_OF.search(name) and not HASH.search(name):
            series.setdefault(f"{name[: match.start()]}*{name[match.end() :]}", set()).add(int(match[0]))
    for pattern, numbers in series.items():
        missing = (number for number in range(min(numbers), max(numbers)) if number not in numbers)
        num_missing = max(numbers) - min(numbers) + 1 - len(numbers)
        if 0 < num_missing < len(numbers):
            texts = ", ".join(map(str, islice(missing, NAMED))) + ", …" * (num_missing > NAMED)
            logger.warning("%s: of %s %s is not there: is that all?", source, pattern, texts)


# --- contents ---------------------------------------------------------------------------------------


def _alike(names: Sequence[str], source: Path) -> Iterator[list[str]]:
    """Find files that hold the same bytes."""
    groups = _grouped(names, lambda name: os.path.getsize(source / name))
    for num_bytes in _READ_BYTES:
        digest = partial(_digest, source, num_bytes)
        groups = [alike for group in groups for alike in _grouped(group, digest)]
    yield from groups


def _grouped(names: Sequence[str], key: Callable[[str], object]) -> list[list[str]]:
    """Group names by a key of their files, without those that are alone, or cannot be read, which reading reports."""
    groups: dict[object, list[str]] = {}
    for name in names:
        with suppress(OSError):
            groups.setdefault(key(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _digest(source: Path, num_bytes: int, name: str) -> bytes:
    """Return a checksum of both ends of a file, of `num_bytes` each."""
    with open(source / name, "rb") as file:
        digest = hashlib.sha256(file.read(num_bytes))
        file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - num_bytes))
        digest.update(file.read(num_bytes))
    return digest.digest()
