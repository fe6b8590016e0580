"""Patterns of the shell's that name parts of a data set, as `--split` takes them."""

from __future__ import annotations

import fnmatch
import glob
import re
import shlex
from collections.abc import Mapping, Sequence

from .split_names import HASH, TEST, TRAIN, VAL

NAMED = 3  # names, or patterns, that a message gives


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a path below the source, its last part or a folder above it; "." names all."""
    if pattern == ".":
        return True
    parts = name.split("/")
    above = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return any(fnmatch.fnmatchcase(text, pattern) for text in (*above, parts[-1]))


def options_of(splits: Mapping[str, str]) -> str:
    """Return `--split` options that name what is of train and of val, or of test if nothing is of val.

    Args:
        splits: The split of each name.
    """
    groups = {split: [name for name in splits if splits[name] == split] for split in (TRAIN, VAL, TEST)}
    test = groups.pop(TEST)
    groups[VAL] = groups[VAL] or test
    return split_options(groups, []) or "--split train=PATTERN --split val=PATTERN"


def split_options(groups: Mapping[str, list[str]], others: Sequence[str]) -> str:
    """Return `--split` options that name the names of each split, and no others; "" where few patterns do not.

    Args:
        groups: The names, by split.
        others: Names that the options must not name.
    """
    words = []
    for split, names in groups.items():
        of_others = [*others, *(name for key, its in groups.items() if key != split for name in its)]
        patterns = _patterns(names, of_others)
        if not patterns and names:
            return ""
        words += [f"--split {split}={shlex.quote(pattern)}" for pattern in patterns]
    return " ".join(words)


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return few patterns that name some names, and not the others; [] if there are none."""
    escaped = [glob.escape(name) for name in names]
    candidates = [escaped]
    if len(names) > NAMED:
        bare = [HASH.sub("*", pattern) for pattern in escaped]
        candidates = [[re.sub("[0-9]+", any_number, pattern) for pattern in bare] for any_number in ("*", "[0-9]*")]
        first, last = _common_start(names), _common_start([name[::-1] for name in names])[::-1]
        candidates.append([f"{glob.escape(first)}*{glob.escape(last)}"])
    for patterns in map(list, map(dict.fromkeys, candidates)):
        is_few = len(patterns) <= NAMED and all(any(matches(name, pattern) for pattern in patterns) for name in names)
        if is_few and not any(matches(name, pattern) for name in others for pattern in patterns):
            return patterns
    return []


def _common_start(names: Sequence[str]) -> str:
    """Return what all names begin with."""
    least, most = min(names), max(names)
    return next((least[:at] for at, char in enumerate(least) if char != most[at]), least)
