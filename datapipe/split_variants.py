"""Parts of one split and variants of it, by their names: `train_0` and `train_1`, `train_HR` and `train_LR`.

What is joined that should not be, such as the same images in two sizes, no later step would notice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .split_names import FOLD, HASH, SUFFIXES, WORD, cased_words, split_words

_COUNTERS = {"part", "parts", "shard", "shards", "chunk", "batch", "piece", "block", "volume", "vol", "of", "no", "nr"}
_LETTERS = re.compile("[a-z]|[a-f]{2}")  # that count, as numbers do: train_a.tar, train_ff.tar
_IDS = re.compile("[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?<![0-9A-Za-z])[0-9a-f]{12,}(?![0-9A-Za-z])")
# Numbers that say what the images are, and not which of the parts it is: versions, sizes, shares.
_SAYING = re.compile(
    r"(?:(?<![A-Za-z])[vV]|(?<=[a-z])V)(?i:(?:er(?:sion)?)?[-_.]?(?P<version>[0-9]+(?:\.[0-9]+)*))"
    r"|(?i:(?<![0-9])(?:[0-9]{2,4}x[0-9]{2,4}|[0-9]+[-_ ]?(?:percent|pct|px|%)|[0-9]+(?:p|k|m|shots?))(?![a-z0-9]))"
)
SIZES = frozenset(map(str, (28, 56, 200, 250, 299, 300, 331, 500, 600, 1000, 1080, *range(32, 2049, 16))))  # of images
_YEARS = frozenset(map(str, range(1990, 2040)))

_Key = frozenset[str]  # what the names of a variant say beside the split


class Variants(NamedTuple):
    """Names of one split, by what they say that others do not; `are_doubtful`: it may be wrong to join them."""

    groups: Mapping[_Key, list[str]]
    are_doubtful: bool


class _Said(NamedTuple):
    words: _Key
    spelling: _Key  # of the split's own words
    numbers: list[str]


def find_variants(names: Sequence[str]) -> Variants | None:
    """Return what names of one split say beside the split, numbers and letters that count; None if all say the same.

    Those groups are doubtful whose folder or file that is called as the split differs, folds and versions, and those of
    which one says less than another; not `train/cat.tar` and `train/dog.tar`.
    """
    by_split = {name: _read("/".join(filter(split_words, name.split("/"))) or name) for name in names}
    whole = {name: _read(name) for name in names}
    groups = _group(names, by_split, SIZES)
    if len(groups) > 1:
        return Variants(groups, True)
    groups = _group(names, whole, ())
    least = min(groups, key=len, default=_Key())
    if len(groups) > 1:
        kinds = {frozenset(word for word in key if word[-1].isdigit()) for key in groups}
        return Variants(groups, len(kinds) > 1 or any(least < key for key in groups))
    groups = _group(names, by_split, _YEARS)
    return Variants(groups, False) if len(groups) > 1 else None


def folds_in(names: Iterable[str]) -> list[str]:
    """List the numbers of the folds that names speak of, in order."""
    return sorted({match[1] for name in names for match in FOLD.finditer(name)}, key=int)


@lru_cache(1024)
def _read(text: str) -> _Said:
    """Read what a part of a name says."""
    text = HASH.sub(" ", _IDS.sub(" ", text))
    words = {f"fold {match[1]}" for match in FOLD.finditer(text)}
    words |= {f"v{match['version']}" if match["version"] else match[0].lower() for match in _SAYING.finditer(text)}
    text = _SAYING.sub(" ", FOLD.sub(" ", text))
    spelling = set()
    for word in cased_words(text):
        if match := WORD.fullmatch(word.lower()):
            spelling.add(word[: match.end(1)])
        else:
            words.add(word.lower())
    counting = {word for word in words if _LETTERS.fullmatch(word)} | _COUNTERS | SUFFIXES
    return _Said(_Key(words - counting), _Key(spelling), re.findall("[0-9]+", text))


def _group(names: Sequence[str], said: Mapping[str, _Said], saying: Collection[str]) -> dict[_Key, list[str]]:
    """Group names by what they say, and by a number of which all are among those that say something."""
    are_spelt_alike = len({said[name].spelling for name in names}) == 1
    groups: dict[_Key, list[str]] = {}
    for name in names:
        groups.setdefault(said[name].words | (_Key() if are_spelt_alike else said[name].spelling), []).append(name)
    divided: dict[_Key, list[str]] = {}
    for key, its in groups.items():
        numbers = _saying_numbers([said[name].numbers for name in its], saying)
        for name, number in zip(its, numbers, strict=True):
            divided.setdefault(key | _Key(filter(None, [number])), []).append(name)
    return dict(sorted(divided.items(), key=lambda pair: len(pair[0])))


def _saying_numbers(numbers: Sequence[Sequence[str]], saying: Collection[str]) -> list[str]:
    """Return of each name the first of its numbers that say something: "" if there are none, or they are all equal."""
    for at in range(max(map(len, numbers))):
        column = [of_name[at] if at < len(of_name) else "" for of_name in numbers]
        if len(set(column)) > 1 and {*column} - {""} <= set(saying):
            return column
    return [""] * len(numbers)
