"""Which tar shards of a folder are of a split, for the loader that reads shards that are not packed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import SettingError
from ..split_names import TEST, TRAIN, own_splits, split_words
from ..splits import AmbiguousSplitError, SplitRule, VariantsError

logger = logging.getLogger(__name__)

SUFFIX = ".tar"
LAST_NUMBER = re.compile("[0-9]+(?=[^0-9]*$)")


def shards_of_split(folder: Path, split: str | None) -> list[str]:
    """List the tar shards of a split, or of the only one. Raises SettingError."""
    entries = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    names = [name for name in entries if name.lower().endswith(SUFFIX)]
    for name in (name for name in entries if names and name not in names and SUFFIX in name.lower()):
        logger.warning("%s: is not read: it is not named as a tar shard", folder / name)
    try:
        names_of = SplitRule().divide(names, folder) if names else {}
        if split == TEST:  # beside val it was not looked at
            SplitRule().divide(names_of.get(TEST, []), folder)
    except AmbiguousSplitError as error:
        example = "shard-{000..009}.tar"
        if isinstance(error, VariantsError):
            variants = next(iter(error.variants.values()))
            example = _in_braces(next(iter(variants.groups.values())))
        which = f"give those that you mean, such as {folder}/{example}"
        raise SettingError(f"path: {folder}: {error.why}; {which}") from error
    if [*names_of] == [TRAIN] and not any(map(split_words, names)) and len(own := own_splits(folder.absolute())) == 1:
        names_of = {own.pop(): names}
    if split is None and len(names_of) > 1:
        which = ", ".join(f"{name} (such as {of_name[0]})" for name, of_name in names_of.items())
        raise SettingError(f"path: {folder} holds shards of {which}: choose one, as split={next(iter(names_of))!r}")
    if split is not None and split not in names_of:
        raise SettingError(f"split: {split!r} is not in {folder}, which has {', '.join(names_of) or 'no tar shards'}")
    return names_of[split] if split else next(iter(names_of.values()), [])


def _in_braces(names: Sequence[str]) -> str:
    """Return a pattern as a shell expands it that names some files.

    >>> _in_braces(["a-0.tar", "a-1.tar"]), _in_braces(["a-0.tar", "a-2.tar"]), _in_braces(["a-0.tar"])
    ('a-{0..1}.tar', '{a-0.tar,a-2.tar}', 'a-0.tar')
    """
    if len(names) == 1:
        return names[0]
    numbers = [match[0] for name in names if (match := LAST_NUMBER.search(name))]
    stems = {LAST_NUMBER.sub("{}", name) for name in names}
    width = len(numbers[0]) if numbers else 0
    if len(stems) == 1 and numbers == [f"{int(numbers[0]) + i:0{width}}" for i in range(len(names))]:
        return stems.pop().replace("{}", f"{{{numbers[0]}..{numbers[-1]}}}")
    return f"{{{','.join(names)}}}"
