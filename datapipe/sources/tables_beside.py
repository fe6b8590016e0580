"""Tables and lists beside class folders: whether they say other labels, or splits, of the images in them."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..console import format_some
from ..split_names import SPLIT_OF, is_split_name, split_words
from .class_tree import ClassTree
from .labels import LABEL_COLUMN

TABLES = (".csv", ".tsv", ".tab")
LISTS = (".txt", ".lst", ".list")  # an image in each line, or its path and more behind a space
STRING = re.compile(r'"([^"\\]+)"(?!\s*:)')  # of JSON, not a key
MAX_TABLES = 8  # that are looked at
BLOCKS = 8  # of a table that are read, over all of its length
BLOCK_BYTES = 1 << 16
NUMERIC = re.compile(r"[-+.0-9e ]*")  # sizes, ages
MAX_IDS = 20  # a column without two equal values holds identifiers, not labels, if it has more rows


def doubt_by_table(tree: ClassTree, tables: Sequence[Path], are_split: bool) -> str:
    """Doubt that the class folders say the labels of their images, where a table names these.

    Some of its rows are read. It agrees if a column has one value for each folder, or the folders' names.

    Args:
        tree: The class folders.
        tables: Files beside them.
        are_split: Whether the folders say the splits, so that the table need not.

    Returns:
        Why; "" if nothing speaks against them.
    """
    for path in [path for path in tables if path.name.lower().endswith(TABLES)][:MAX_TABLES]:
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
    called as those of train and of another split at once.

    Args:
        tree: The class folders.

    Returns:
        Some of the names that each has: of lists those of the images, of tables and JSON none.
    """
    inside = (path for content in tree.classes.values() if not content.folders for path in content.others)
    files = [name for name in (*tree.beside, *inside) if name.lower().endswith((*TABLES, *LISTS, ".json"))]
    named = [tree.root / name for name in files if split_words(os.path.basename(name))]
    lists: dict[Path, list[str]] = {}
    for path in named[:MAX_TABLES]:
        rows = _sample_entries(path)
        at, classes = _find_paths(tree, rows[0] if rows else [], rows)
        is_of_both = len({SPLIT_OF[word] for word in split_words(path.name)}) > 1
        if is_of_both or 2 * len(classes) > len(rows):
            lists[path] = [rows[i][at] for i in classes] if path.name.lower().endswith(LISTS) else []
    return lists


def lists_of_rows(folder: Path, images: Iterable[str]) -> list[str]:
    """Find the lists in a folder that are called as those of splits, and most of whose lines name images of a table.

    Args:
        folder: Folder of the table.
        images: The names of the images' files.

    Returns:
        The names of the lists, sorted.
    """
    files = sorted(
        name for name in os.listdir(folder) if name.lower().endswith((*LISTS, ".json")) and split_words(name)
    )
    names = {text for name in images for text in (name, name.rpartition(".")[0])} if files else set()
    lists = []
    for file in files[:MAX_TABLES]:
        rows = _sample_entries(folder / file)
        columns = [[cell.rpartition("/")[2] in names for cell in column] for column in zip(*rows, strict=True)]
        if any(2 * sum(column) > len(rows) for column in columns):
            lists.append(file)
    return lists


def _sample_entries(path: Path) -> list[list[str]]:
    """Read some entries of a table, a list or JSON, each as texts of which one may be an image's name."""
    if path.name.lower().endswith(TABLES):
        rows = list(sample_rows(path))
        return [row for row in rows if len(row) == len(rows[0])]
    lines = [line for of_block in _sample_lines(path) for line in of_block]
    if path.name.lower().endswith(LISTS):
        return [[line.strip(), line.split()[0]] for line in lines if line.strip()]
    return [[text] for line in lines for text in STRING.findall(line)]


def _may_be_labels(name: str, column: Sequence[str]) -> bool:
    """Whether a column may hold labels: by its name, or since it holds texts, and some of them several times."""
    num_values = len(set(column))
    is_id = num_values == len(column) > MAX_IDS
    is_number = all(map(NUMERIC.fullmatch, column))
    return LABEL_COLUMN.fullmatch(name) is not None or (num_values > 1 and not is_id and not is_number)


def sample_rows(path: Path) -> Iterator[list[str]]:
    """Read some rows of a table, the first included; none if it cannot be read, or is a link."""
    delimiter = ""
    with suppress(csv.Error):
        for lines in _sample_lines(path):
            delimiter = delimiter or max(",;\t", key=lines[0].count)
            yield from csv.reader(lines, delimiter=delimiter)


def _sample_lines(path: Path) -> Iterator[list[str]]:
    """Read some blocks of lines of a text, the first included; none if it cannot be read, or is a link."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            for start in range(0, size, max(BLOCK_BYTES, -(-size // BLOCKS))):
                file.seek(start)
                lines = file.read(BLOCK_BYTES).decode("utf-8-sig" if not start else "utf-8", "replace").splitlines()
                lines = lines[start > 0 : None if start + BLOCK_BYTES >= size else -1]
                if lines:
                    yield lines


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
