"""How to bring labels that stand in a list beside images, or in their names, into a form that is read: by a command."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from shlex import quote

from ..split_names import SPLIT_OF, is_split_name, split_words
from .class_folders import OF_IMAGES
from .file_names import EXTENSIONS, is_hidden, is_image

LISTS = (".txt", ".tsv")
LOOKED_AT = 100  # lines of a list
FEW = 3  # folders that may be classes
NUMBERS = r"[-_. (]*[0-9]+[)]*$"  # at the end of an image's name
SORT = (
    "cd {folder} && while read -r image class rest; do "
    'mkdir -p "$class" && mv {images}"$image" "$class/"; done < {list}'
)
WRITE = (
    "python -c \"import csv, pathlib, re; csv.writer(open('labels.csv', 'w', newline='')).writerows("
    "[('path', 'label'), *((path, {label}) for path in sorted(pathlib.Path('{folder}').rglob('*')) "
    "if path.suffix.lower() in {suffixes} and not re.search('(^|/)([.@]|__MACOSX)', path.as_posix()))])\""
)
TOP = "path.parts[0]"  # the label of an image in class/…: the class
JOIN = (
    "python -c \"import csv, pathlib; csv.writer(open('labels.csv', 'w', newline='')).writerows("
    "[('path', 'label', 'split'), *((name, pathlib.PurePath(name).parent.name, split) for split, file in {lists} "
    'for name in (line{word} for line in open(file) if line.strip()))])"'
)
PLAIN = re.compile(r"[\w ./()+,@=-]+")  # what needs no quotes in it


def advise_sorting(folder: Path, classes: Collection[str]) -> str:
    """Say how to sort images by a list beside them, whose lines have an image and a class, as Tiny ImageNet has it.

    Args:
        folder: Folder of a split, with the images in it or in one below, such as `images`.
        classes: Classes of train.

    Returns:
        The command; "" without such a list.
    """
    with suppress(OSError):
        places = ["", *(entry.name for entry in os.scandir(folder) if entry.name.lower() in OF_IMAGES)]
        for name in sorted(name for name in os.listdir(folder) if name.lower().endswith(LISTS)):
            with open(folder / name, encoding="utf-8", errors="replace") as file:
                rows = [line.split() for line in islice(file, LOOKED_AT)]
            if not rows or any(len(row) < 2 or row[1] not in classes or "/" in row[0] for row in rows):
                continue
            for place in places:
                if all((folder / place / row[0]).is_file() for row in rows):
                    images = quote(place) + "/" if place else ""
                    rest = f" && rmdir {quote(place)}" if place else ""
                    return SORT.format(folder=quote(str(folder)), images=images, list=quote(name)) + rest
    return ""


def advise_listing(source: Path) -> str:
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
        label = f"re.sub(r'{NUMBERS}', '', path.stem)"
    else:
        if len(folders) < FEW or not all(map(_may_be_class, folders)):
            return ""
        what = f"if each folder of images is a class of its own, such as {next(iter(folders))}"
        label, place = "path.parent", "."
    return advise_writing(source, what, label, place) if PLAIN.fullmatch(place) else ""


def advise_writing(source: Path, what: str, label: str, place: str = ".") -> str:
    """Say by which command to write a table of images, and when.

    Args:
        source: Folder in which to run the command.
        what: The condition.
        label: Python's expression for the label of `path`, such as TOP.
        place: The folder of the images, below the source.

    Returns:
        The text.
    """
    command = WRITE.format(label=label, folder=place, suffixes=EXTENSIONS)
    return f"{what}, run in {quote(str(source))}, and give the labels.csv that it writes: {command}"


def advise_lists(source: Path, lists: Mapping[Path, Sequence[str]], classes: Collection[str]) -> str:
    """Say how to write a table of images that a list of each split names by class and image; "" if they do not.

    Args:
        source: Folder in which to run the command.
        lists: The lists, and some of the names in each.
        classes: The class folders.

    Returns:
        The text.
    """
    by_split = {path: {SPLIT_OF[word] for word in split_words(path.name)} for path, names in lists.items() if names}
    pairs = sorted((min(splits), os.path.relpath(path, source)) for path, splits in by_split.items())
    names = [name for path in by_split for name in lists[path]]
    is_clear = len(pairs) == len({split for split, _ in pairs}) > 1 and max(map(len, by_split.values())) == 1
    are_whole = {os.path.basename(os.path.dirname(name)) for name in names} <= {*classes}
    if not (is_clear and are_whole and all(PLAIN.fullmatch(file) for _, file in pairs)):
        return ""
    command = JOIN.format(lists=pairs, word=".strip()" if any(" " in name for name in names) else ".split()[0]")
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
    return re.sub(NUMBERS, "", os.path.splitext(name)[0])
