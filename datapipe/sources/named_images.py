"""Images that tables and lists name: those below a table's folder, and those in class folders beside it.

A table may name an image by an id without extension, without the folder, with backslashes, by an address
(`gs://bucket/…`, `C:\\…`), or by a path on another machine (`/home/me/…`). Of class folders, tables and lists may say
other labels, or the splits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ..console import format_count, format_some
from ..split_names import NAMED, is_split_name, split_words, splits_of
from .class_tree import ClassTree
from .file_names import is_hidden, is_image
from .labels import LABEL_COLUMN
from .listing import is_folder
from .paths import is_inside, real_path
from .tables import sample_lines, sample_rows

_ELSEWHERE = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:)?[/\\]+")  # how an address on another machine begins

_Places = dict[str, list[str]]  # images' paths below the folder, by their last part with and without extension
_TABLES = (".csv", ".tsv", ".tab")
_LISTS = (".txt", ".lst", ".list")  # an image in each line, or its path and more behind a space
_STRING = re.compile(r'"([^"\\]+)"(?!\s*:)')  # of JSON, not a key
_MAX_TABLES = 8  # that are looked at
_NUMERIC = re.compile(r"[-+.0-9e ]*")  # sizes, ages
_MAX_IDS = 20  # a column without two equal values holds identifiers, not labels, if it has more rows


class NamedImages:
    """The images below a folder, as a table may name them. They are listed once, when the first name is looked up."""

    def __init__(self, folder: str, bounds: str | None) -> None:
        """Keep the folder, and the one that links must not leave (None: links may lead anywhere)."""
        self._folder = folder
        self._bounds = bounds

    def find(self, names: Sequence[str], table: str = "") -> list[list[str]]:
        """Find the images that a table names, and return the paths below the folder that each name may mean.

        Names may be whole paths, of which the extension lacks, or the ends of paths: the first reading by which each is
        exactly one image, or else the one by which most are. Of an address the first parts may lack below the folder. A
        table whose own name speaks of a split may name images in folders that speak of it.
        """
        texts = [_clean(name) for name in names]
        is_address = any(map(_ELSEWHERE.match, names))
        places = self._places(texts)
        best: list[list[str]] = []
        most = (-1, -1)
        for skipped in range(max(text.count("/") for text in texts) + 1 if is_address else 1):
            ends = ["/".join(text.split("/")[min(skipped, text.count("/")) :]) for text in texts]
            for matches in _readings(ends, places, splits_of(table)):
                num_clear = sum(len(of_name) == 1 for of_name in matches), sum(map(bool, matches))
                if num_clear > most:
                    best, most = matches, num_clear
                if num_clear[0] == len(texts):
                    return matches
        return best

    def advise(self, name: str) -> str:
        """Say how a path that names no file should be written, if an image is called as its last part; "": none is."""
        places = self._places([_clean(name)])
        if not places:
            return ""
        advice = "write it so in the table, whose paths begin in its folder and are whole"
        above = os.path.dirname(self._folder)
        if os.path.lexists(os.path.join(above, name)):
            advice = f"put the table into {above}, where its paths begin, and give it there"
        return f"{name} names no file, and {min(min(places.values()))} does: {advice}"

    def _places(self, texts: Iterable[str]) -> _Places:
        """List the images whose names, with or without extension, are the last parts of some texts."""
        names = set(map(_last, texts))
        places: _Places = {}
        for path in self._paths:
            file = _last(path)
            for name in {file, file.rpartition(".")[0]} & names:
                places.setdefault(name, []).append(path)
        return places

    @cached_property
    def _paths(self) -> list[str]:
        real_bounds = None if self._bounds is None else real_path(self._bounds)
        paths, folders, linked = [], [""], {real_path(self._folder)}
        while folders:
            inner = folders.pop()
            with suppress(OSError), os.scandir(os.path.join(self._folder, inner)) as entries:  # it has none
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    path = os.path.join(inner, entry.name)
                    if is_image(entry.name):
                        paths.append(path)
                    elif is_folder(entry) and not entry.is_symlink():
                        folders.append(path)
                    elif is_folder(entry):
                        real = real_path(entry.path)
                        if real not in linked and (real_bounds is None or is_inside(real, real_bounds)):
                            linked.add(real)
                            folders.append(path)
        return sorted(paths)


def _readings(ends: Sequence[str], places: _Places, splits: set[str]) -> Iterator[list[list[str]]]:
    """Yield the images of each name as a whole path, as the end of one, and as that of one in a folder of a split."""
    by_end = [[place for place in places.get(_last(end), ()) if _is_end(end, place)] for end in ends]
    yield [
        [place for place in matches if place.count("/") == end.count("/")]
        for end, matches in zip(ends, by_end, strict=True)
    ]
    yield by_end
    if splits:
        yield [[place for place in matches if splits_of(os.path.dirname(place)) == splits] for matches in by_end]


def describe_doubt(matches: Mapping[str, Sequence[str]], num_rows: int) -> str:
    """Say which of a table's names may mean no image, or several, and what to do. `num_rows`: how many it has."""
    missing = [name for name, places in matches.items() if not places]
    several = [f"{name} ({' and '.join(places[:2])})" for name, places in matches.items() if places]
    texts = []
    if missing:
        texts.append(f"{len(missing)} without an image, such as {format_some(missing[:NAMED])}")
    if several:
        texts.append(f"{len(several)} with several, such as {format_some(several[:NAMED])}")
    advice = "write their paths from the table's folder into it" if several else "add the images, or remove the rows"
    return f"of {format_count(num_rows, 'name')}, {'; '.join(texts)}: {advice}"


def _clean(name: str) -> str:
    return _ELSEWHERE.sub("", name, count=1).replace("\\", "/").strip("/")


def _last(text: str) -> str:
    return text.rpartition("/")[2]


def _is_end(end: str, place: str) -> bool:
    place = place if is_image(end) else place.rpartition(".")[0]
    return place == end or place.endswith(f"/{end}")


def doubt_by_table(tree: ClassTree, tables: Sequence[Path], are_split: bool) -> str:
    """Return why class folders may not say the labels of images that a table names; "" if nothing speaks against them.

    Some of its rows are read. It agrees if a column has one value for each folder, or the folders' names.

    Args:
        tree: The class folders.
        tables: Files beside them.
        are_split: Whether the folders say the splits, so that the table need not.
    """
    for path in [path for path in tables if path.name.lower().endswith(_TABLES)][:_MAX_TABLES]:
        rows = list(sample_rows(path))
        header, rows = (rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]) if rows else ([], [])
        at, folders = _find_paths(tree, header, rows)
        named = sorted(set(folders.values()))
        if not named:
            continue
        columns = {name: [row[i] for row in rows] for i, name in enumerate(header) if i != at}
        names = f"{path.name} names images of {format_some(named)}"
        for name, column in columns.items():
            if len(set(column)) > 1 and all(map(is_split_name, column)) and not are_split:
                return f"{names}, and its column {name} says the splits"
        may_be = [[column[i] for i in folders] for name, column in columns.items() if _may_be_labels(name, column)]
        if may_be and not any(_agrees(column, list(folders.values())) for column in may_be):
            return f"{names}, and its labels are not these folders"
    return ""


def lists_of_splits(tree: ClassTree) -> dict[Path, list[str]]:
    """Find files that are called as those of splits, and that say which images in class folders are whose.

    They lie beside the class folders, or in a folder there without images. Most of their lines name images; or they are
    called as those of train and of another split at once. Of each list some of its images' names are returned; of
    tables and JSON none.
    """
    inside = (path for content in tree.classes.values() if not content.folders for path in content.others)
    files = [name for name in (*tree.beside, *inside) if name.lower().endswith((*_TABLES, *_LISTS, ".json"))]
    named = [tree.root / name for name in files if split_words(os.path.basename(name))]
    lists: dict[Path, list[str]] = {}
    for path in named[:_MAX_TABLES]:
        rows = _sample_entries(path)
        at, classes = _find_paths(tree, rows[0] if rows else [], rows)
        is_of_both = len(splits_of(path.name)) > 1
        if is_of_both or 2 * len(classes) > len(rows):
            lists[path] = [rows[i][at] for i in classes] if path.name.lower().endswith(_LISTS) else []
    return lists


def lists_of_rows(folder: Path, images: Iterable[str]) -> list[str]:
    """List a folder's lists that are called as those of splits, and mostly name images of a table."""
    files = sorted(
        name for name in os.listdir(folder) if name.lower().endswith((*_LISTS, ".json")) and split_words(name)
    )
    names = {text for name in images for text in (name, name.rpartition(".")[0])} if files else set()
    lists = []
    for file in files[:_MAX_TABLES]:
        rows = _sample_entries(folder / file)
        columns = [[cell.rpartition("/")[2] in names for cell in column] for column in zip(*rows, strict=True)]
        if any(2 * sum(column) > len(rows) for column in columns):
            lists.append(file)
    return lists


def _sample_entries(path: Path) -> list[list[str]]:
    """Read some entries of a table, a list or JSON, each as texts of which one may be an image's name."""
    if path.name.lower().endswith(_TABLES):
        rows = list(sample_rows(path))
        return [row for row in rows if len(row) == len(rows[0])]
    lines = [line for of_block in sample_lines(path) for line in of_block]
    if path.name.lower().endswith(_LISTS):
        return [[line.strip(), line.split()[0]] for line in lines if line.strip()]
    return [[text] for line in lines for text in _STRING.findall(line)]


def _may_be_labels(name: str, column: Sequence[str]) -> bool:
    """Whether a column may hold labels: by its name, or since it holds texts, and some of them several times."""
    num_values = len(set(column))
    is_id = num_values == len(column) > _MAX_IDS
    is_number = all(map(_NUMERIC.fullmatch, column))
    return LABEL_COLUMN.fullmatch(name) is not None or (num_values > 1 and not is_id and not is_number)


def _find_paths(tree: ClassTree, header: list[str], rows: list[list[str]]) -> tuple[int, dict[int, str]]:
    """Find the column that names images: its number, and of its rows the class folder; of none if two may be meant."""
    columns = [[cell.replace("\\", "/").strip("/") for cell in column] for column in zip(*rows, strict=True)]
    last_parts = {cell.rpartition("/")[2] for column in columns for cell in column}
    places: dict[str, list[tuple[str, str]]] = {}  # by name, with and without extension: class and path of each
    for name, content in tree.classes.items():
        for folder, images in content.folders:
            for image in images:
                for key in {image, image.rpartition(".")[0]} & last_parts:
                    places.setdefault(key, []).append((name, f"{tree.root}/{folder}/{key}"))
    best: tuple[int, dict[int, str]] = -1, {}
    for at in range(len(header) if columns else 0):
        classes_by_row = {}
        for i, cell in enumerate(columns[at]):
            classes = {name for name, path in places.get(cell.rpartition("/")[2], []) if _is_tail(cell, path)}
            if len(classes) == 1:
                classes_by_row[i] = classes.pop()
        best = max(best, (at, classes_by_row), key=lambda pair: len(pair[1]))
    return best


def _is_tail(cell: str, path: str) -> bool:
    """Whether a path in a table, which may begin in any folder, may be an image's: both end alike, with the folder."""
    return path.split("/")[-2:][-1 - ("/" in cell) :] == cell.split("/")[-2:]


def _agrees(column: list[str], folders: list[str]) -> bool:
    """Whether a column has one value for each folder; one folder alone must be called so."""
    pairs = set(zip(column, folders, strict=True))
    are_names = all(value.casefold() == folder.casefold() for value, folder in pairs)
    return are_names or (1 < len(set(folders)) == len(pairs) == len(set(column)))
