"""What to type to have images read by labels that stand in a table or a list beside them, or in their names.

What is advised was tried, except the commands that write a table or sort images.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from shlex import quote

from ..console import format_some
from ..errors import DatapipeError, SettingError
from ..split_names import TRAIN, is_split_name, options_of, split_words, splits_of
from ..splits import AmbiguousSplitError, SplitRule
from . import csv
from .class_folders import OF_IMAGES
from .file_names import EXTENSIONS, is_hidden, is_image
from .labels import LABEL_COLUMN
from .listing import LeftOut, Listing, folders_in
from .tables import sample_rows, tables_in

_COLUMNS = "a CSV file with the columns path, label and, if need be, split"
_LISTS = (".txt", ".tsv")
_LOOKED_AT = 100  # lines of a list
_FEW = 3  # folders that may be classes
_NUMBERS = r"[-_. (]*[0-9]+[)]*$"  # at the end of an image's name
_SORT = (
    "cd {folder} && while read -r image class rest; do "
    'mkdir -p "$class" && mv {images}"$image" "$class/"; done < {list}'
)
_WRITE = (
    "python -c \"import csv, pathlib, re; csv.writer(open('labels.csv', 'w', newline='')).writerows("
    "[('path', 'label'), *((path, {label}) for path in sorted(pathlib.Path('{folder}').rglob('*')) "
    "if path.suffix.lower() in {suffixes} and not re.search('(^|/)([.@]|__MACOSX)', path.as_posix()))])\""
)
TOP = "path.parts[0]"  # the label of an image in class/…: the class
_JOIN = (
    "python -c \"import csv, pathlib; csv.writer(open('labels.csv', 'w', newline='')).writerows("
    "[('path', 'label', 'split'), *((name, pathlib.PurePath(name).parent.name, split) for split, file in {lists} "
    'for name in (line{word} for line in open(file) if line.strip()))])"'
)
_PLAIN = re.compile(r"[\w ./()+,@=-]+")  # what needs no quotes in it


def advise_tables(source: Path, listing: Listing) -> str:
    """Say how to read the images by a table, if there is one that may have their labels."""
    tables = tables_in(source)
    inside = [f"{name}/{table}" for name in folders_in(source) for table in tables_in(source / name)]
    if not tables and inside:
        return f"if {inside[0]} has labels of the images beside it, write {_COLUMNS}, of all, and give that"
    if not tables:
        by_path = f"{text}; " if (text := _advise_listing(source)) else ""
        return f"{by_path}if a table has their classes, give that, {_COLUMNS}"
    by_name = {name: its.pop() for name in tables if len(its := splits_of(name)) == 1}
    splits = [options_of(by_name)] if len(by_name) > 1 and TRAIN in by_name.values() else []
    columns = [] if listing.label_column else _label_columns(source, list(by_name) if splits else tables)
    faults: list[Exception | None] = []
    for of_splits, column in itertools.product(["", *splits], ["", *columns]):
        rule = SplitRule.parse(shlex.split(of_splits)[1::2])
        tried = replace(listing, rule=rule, label_column=column or listing.label_column)
        faults.append(_find_fault(source, tried))
        is_clear = faults[-1] is None
        if isinstance(faults[-1], AmbiguousSplitError) and len(tables) == 1:  # which says itself what to type next
            is_clear = _find_fault(source, replace(tried, rule=SplitRule.parse(["train=."]))) is None
        if is_clear:
            named = [f"--label-column {shlex.quote(column)}"] if column else []
            typed = " ".join(["--kind csv", *named, *filter(None, [of_splits])])
            return f"if {_have(list(by_name) if of_splits else tables)} their labels, type {typed}"
    fault = _find_fault(source, listing) if listing.rule.patterns else faults[0]
    advice = f"write {_COLUMNS}, and give that"
    if isinstance(fault, AmbiguousSplitError):
        if len(tables) > 1:
            advice = f"they have to be read with --kind csv and options: {fault.why}"
    elif isinstance(fault, DatapipeError | SettingError):
        what = str(fault).removeprefix(f"{source}: ").removeprefix(f"{source}/")
        advice = f"--kind csv reads {'it' if len(tables) == 1 else 'them'} once this is settled: {what}"
    return f"if {_have(tables)} their labels, {advice}"


def _find_fault(source: Path, listing: Listing) -> Exception | None:
    """Return what speaks against reading tables; None if they name images that are there, and have their labels."""
    try:
        with without_log():
            splits = csv.load(source, "csv", replace(listing, left_out=LeftOut())).splits
    except (DatapipeError, SettingError) as error:
        return error
    are_there = bool(splits) and all(len(its) and os.path.exists(its.where(0)) for its in splits.values())
    return None if are_there else FileNotFoundError(source)


@contextmanager
def without_log() -> Iterator[None]:
    """Log nothing of what is tried, since it is not packed yet."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _have(tables: Sequence[str]) -> str:
    return f"{format_some(tables)} {'have' if len(tables) > 1 else 'has'}"


def _label_columns(source: Path, tables: Sequence[str]) -> list[str]:
    """Return the column that alone may hold the labels in each of several tables; none if there are others."""
    headers = [[name.strip() for name in next(sample_rows(source / table), [])] for table in tables]
    named = [[name for name in header if LABEL_COLUMN.fullmatch(name)] for header in headers]
    return named[0] if len(named[0]) == 1 and all(names == named[0] for names in named) else []


def advise_sorting(folder: Path, classes: Collection[str]) -> str:
    """Say by which command to sort images by a list beside them, as Tiny ImageNet has it; "" without such a list.

    Its lines have an image and a class of train. The images lie in the folder, or in one below, such as `images`.
    """
    with suppress(OSError):  # without what cannot be read there is no advice
        places = ["", *(entry.name for entry in os.scandir(folder) if entry.name.lower() in OF_IMAGES)]
        for name in sorted(name for name in os.listdir(folder) if name.lower().endswith(_LISTS)):
            with open(folder / name, encoding="utf-8", errors="replace") as file:
                rows = [line.split() for line in islice(file, _LOOKED_AT)]
            if not rows or any(len(row) < 2 or row[1] not in classes or "/" in row[0] for row in rows):
                continue
            for place in places:
                if all((folder / place / row[0]).is_file() for row in rows):
                    images = quote(place) + "/" if place else ""
                    rest = f" && rmdir {quote(place)}" if place else ""
                    return _SORT.format(folder=quote(str(folder)), images=images, list=quote(name)) + rest
    return ""


def _advise_listing(source: Path) -> str:
    """Say how to write a table of images whose names, or whose folders in folders, may be their classes; "" if none."""
    folders = dict(_folders_of_images(source))
    if folders and all(map(_is_split_of_class, folders)):
        first = next(iter(folders))
        return advise_writing(source, f"if {first} is for a split of the class {os.path.dirname(first)}", TOP)
    if by_name := [folder for folder, names in folders.items() if _name_classes(names)]:
        best = max(by_name, key=lambda folder: (os.path.basename(folder).lower() in OF_IMAGES, len(folders[folder])))
        name = folders[best][0]
        place = "." if len(by_name) > 1 and all(map(split_words, by_name)) else best
        what = f"if the names of images begin with their classes, such as {_stem(name)} in "
        what += os.path.normpath(os.path.join(best, name))
        label = f"re.sub(r'{_NUMBERS}', '', path.stem)"
    else:
        if len(folders) < _FEW or not all(map(_may_be_class, folders)):
            return ""
        what = f"if each folder of images is a class of its own, such as {next(iter(folders))}"
        label, place = "path.parent", "."
    return advise_writing(source, what, label, place) if _PLAIN.fullmatch(place) else ""


def advise_writing(source: Path, what: str, label: str, place: str = ".") -> str:
    """Return by which command to write a table of images, and when.

    Args:
        source: Folder in which to run the command.
        what: The condition.
        label: Python's expression for the label of `path`, such as TOP.
        place: The folder of the images, below the source.
    """
    command = _WRITE.format(label=label, folder=place, suffixes=EXTENSIONS)
    return f"{what}, run in {quote(str(source))}, and give the labels.csv that it writes: {command}"


def advise_lists(source: Path, lists: Mapping[Path, Sequence[str]], classes: Collection[str]) -> str:
    """Return how to write a table of images that a list of each split names by class and image; "" if they do not.

    Args:
        source: Folder in which to run the command.
        lists: The lists, and some of the names in each.
        classes: The class folders.
    """
    by_split = {path: splits_of(path.name) for path, names in lists.items() if names}
    pairs = sorted((min(splits), os.path.relpath(path, source)) for path, splits in by_split.items())
    names = [name for path in by_split for name in lists[path]]
    is_clear = len(pairs) == len({split for split, _ in pairs}) > 1 and max(map(len, by_split.values())) == 1
    are_whole = {os.path.basename(os.path.dirname(name)) for name in names} <= {*classes}
    if not (is_clear and are_whole and all(_PLAIN.fullmatch(file) for _, file in pairs)):
        return ""
    command = _JOIN.format(lists=pairs, word=".strip()" if any(" " in name for name in names) else ".split()[0]")
    return f"if so, run in {quote(str(source))}, and give the labels.csv that it writes: {command}"


def _is_split_of_class(folder: str) -> bool:
    """Whether a folder lies in one that may be a class, and is called as a split, such as `cat/train`."""
    above, _, name = folder.partition("/")
    return is_split_name(name) and not split_words(above) and above.lower() not in OF_IMAGES


def _may_be_class(folder: str) -> bool:
    """Whether a folder in folders may be a class: none is called as a split, as its images, or as the one around it."""
    parts = folder.split("/")
    is_copy = any(part == above for above, part in pairwise(parts))
    return len(parts) > 1 and not is_copy and not any(split_words(part) or part.lower() in OF_IMAGES for part in parts)


def _folders_of_images(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders that hold images, below a source, and the names of some of these."""
    for above, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        images = [name for name in sorted(names) if is_image(name) and not is_hidden(name)]
        if images:
            yield os.path.relpath(above, source), images


def _name_classes(names: Sequence[str]) -> bool:
    """Whether names of images may say classes: some words, each of several images, that differ by a number behind."""
    counts = Counter(map(_stem, names))
    are_words = all(re.search("[A-Za-z]", stem) and not split_words(stem) for stem in counts)
    return len(counts) > 1 and min(counts.values()) > 1 and are_words


def _stem(name: str) -> str:
    return re.sub(_NUMBERS, "", os.path.splitext(name)[0])
