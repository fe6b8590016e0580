"""A CSV table of image files and labels: one file, or a folder with a table for each split.

The first row names the columns; commas separate them, or semicolons or tabs if it has no comma. The first name of PATHS
that is there is the column of paths, and likewise with LABELS.
A column of splits says which split a row belongs to, or the file's name, or else the paths (see `parts`). Paths are
relative to the table's folder.
"""

from __future__ import annotations

import csv
import logging
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..console import format_count, printable
from ..errors import SourceError
from ..split_names import SPLIT_OF, TRAIN, split_words
from . import Source
from .file_names import EXTENSIONS, is_hidden, is_submission
from .files import Files
from .labels import check_same_classes, number_labels
from .listing import Listing, is_folder
from .parts import Listed, choose_files, divide, pick
from .paths import is_inside, opened, real_path
from .split_columns import Columns, Part, Said
from .split_paths import Paths

logger = logging.getLogger(__name__)

PATHS = ("path", "file", "filename", "image", "image_path", "file_name", "file_path", "filepath", "image_file",
         "image_name", "img", "img_path")  # fmt: skip
LABELS = ("label", "class", "target", "category")
SEPARATORS = {";": "semicolons", "\t": "tabs"}  # other than commas
LOOKED_AT = 8  # rows of a split, to see whether paths name files
FOLDERS = 100  # folders that are looked into where they do not
MAX_LINE_BYTES = 1 << 20  # a path has 4,096 at most


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return "csv" if path.name.lower().endswith((".csv", ".tsv")) else None
    words = list(map(split_words, _tables(path)))
    return "csv" if words and all(words) and any(SPLIT_OF[word] == TRAIN for word in chain(*words)) else None


def _tables(folder: Path) -> list[str]:
    names = (entry.name for entry in os.scandir(folder))
    return sorted(n for n in names if n.lower().endswith(".csv") and not is_hidden(n) and not is_submission(n))


def load(path: Path, kind: str, listing: Listing) -> Source:
    folder = path if path.is_dir() else path.parent
    reader = _Reader(str(folder), None if listing.outside else str(folder), listing)
    tables = _tables(path) if path.is_dir() else [path.name]
    if not tables:
        raise SourceError("holds no .csv files", path=path)
    files = choose_files(tables, listing, path)
    for name in files:
        reader.read(folder / name, reader.bounds if path.is_dir() else None)  # one that the user named may be a link
    if not reader.files:
        raise SourceError("holds no rows", path=path)
    listed = reader.listed(folder)
    picked = divide(listed, files, listing, path)
    texts = {split: pick(reader.labels, rows) for split, rows in picked.items()}
    classes, labels = number_labels(path, texts, listing.labels)
    paths = listed.paths()
    if path.is_dir():
        places = zip((paths.folders[number] for number in paths.folder.tolist()), paths.files, strict=True)
        listing.left_out.add_unnamed(path, chain([("", name) for name in tables], places), "named by no row")
    splits = {}
    for split, rows in picked.items():
        _check_first(path, folder, paths, rows)
        used, numbers = np.unique(paths.folder[rows], return_inverse=True)
        splits[split] = Files(
            root=str(folder),
            bounds=reader.bounds,
            folders=[paths.folders[number] for number in used.tolist()],
            folder=numbers.astype(np.int32),
            files=list(pick(paths.files, rows)),
            labels=labels[split],
        )
    _check_rows(path, splits, classes)
    return Source(kind, classes, splits)


def _check_first(source: Path, folder: Path, paths: Paths, rows: np.ndarray) -> None:
    """Raise SourceError if the first rows name no files, and it is clear how the first should be written.

    Args:
        source: The data set, for messages.
        folder: The folder that paths begin in.
        paths: Those of all rows.
        rows: int64[M], the rows of a split.
    """
    first = [os.path.join(paths.folders[paths.folder[i]], paths.files[i]) for i in rows[:LOOKED_AT].tolist()]
    if not first or any(os.path.lexists(folder / path) for path in first):
        return
    path = first[0]
    parts = path.replace("\\", "/").lstrip("/").split("/")
    below = ["", *sorted(entry.name for entry in os.scandir(folder) if is_folder(entry))[:FOLDERS]]
    tails = ("/".join(parts[at:]) for at in range(len(parts)))
    others = (os.path.join(name, tail + suffix) for tail in tails for name in below for suffix in ("", *EXTENSIONS))
    meant = next((other for other in others if os.path.lexists(folder / other)), None)
    if meant is None:
        return  # packing reports it as a bad image
    advice = "write it so in the table, whose paths begin in its folder and are whole"
    if os.path.lexists(folder.parent / path):
        advice = f"put the table into {folder.parent}, where its paths begin, and give it there"
    raise SourceError(f"{path} names no file, and {meant} does: {advice}", path=source)


def _check_rows(source: Path, splits: Mapping[str, Files], classes: Sequence[str]) -> None:
    """Warn of images that have two labels, or are in two splits."""

    def rows() -> Iterator[tuple[str, str, str]]:
        for name, part in splits.items():
            columns = part.folder.tolist(), part.files, part.labels.tolist()
            for folder, file, label in zip(*columns, strict=True):
                yield os.path.join(part.folders[folder], file), name, classes[label]

    hashes = np.fromiter((hash(path) for path, _, _ in rows()), np.int64)  # eight bytes of each, for a while
    distinct, counts = np.unique(hashes, return_counts=True)
    repeated = set(distinct[counts > 1].tolist())
    seen: dict[str, tuple[str, str]] = {}
    differing: dict[str, list[str]] = {"splits": [], "labels": []}
    for path, split, label in rows() if repeated else ():
        if hash(path) in repeated:
            before = seen.setdefault(path, (split, label))
            for what, first, second in zip(differing, before, (split, label), strict=True):
                if first != second:
                    differing[what].append(f"{path}, of {first} and {second}")
    for what, places in differing.items():
        if places:
            rows_of = format_count(len(places), "row names an image", "rows name images")
            logger.warning("%s: %s that others give other %s, such as %s", source, rows_of, what, printable(places[0]))


class _Reader:
    """The rows of tables, one after the other. `labels` and `files` have an entry per row."""

    def __init__(self, folder: str, bounds: str | None, listing: Listing) -> None:
        self.bounds = bounds
        self.files: list[str] = []
        self.labels: list[str] = []  # "": none
        self._folders: dict[str, int] = {}  # a folder's number by its path
        self._folder = array("i")
        self._parts: dict[Part, int] = {}
        self._part = array("i")
        self._unlabelled = array("q"), array("q")  # rows without a label, and their lines; 0: the table has no labels
        self._columns: dict[str, Columns] = {}  # of each table
        self._headers: dict[str, str] = {}  # of each table, for messages
        self._listing = listing
        self._roots = (folder, real_path(folder))  # an absolute path in the folder begins with one of them
        self._texts: dict[str, str] = {}  # one copy of each label, to save memory

    def read(self, table: Path, bounds: str | None) -> None:
        """Add the rows of a table.

        Args:
            table: The file.
            bounds: The folder that it must lie in; None: any.

        Raises:
            SourceError: The table cannot be read, or names paths that lead out of the source.
        """
        with opened(str(table), bounds) as fd, open(fd, "rb", closefd=False) as file:
            lines = _lines(table, file)
            first = next(lines, "")
            separator = next((mark for mark in SEPARATORS if mark in first and "," not in first), ",")
            if separator in SEPARATORS:
                logger.info("%s: its columns are separated by %s", table, SEPARATORS[separator])
            rows = csv.reader(chain([first], lines), delimiter=separator, strict=True)
            try:
                header = [name.strip().lower() for name in next(rows, [])]
                path_at, label_at, others = _columns(header, self._listing)
                header = [
                    f"{name} ({n + 1})" if (n := header[:at].count(name)) else name for at, name in enumerate(header)
                ]
                self._headers[table.name] = ", ".join(header)
                rivals = [
                    header.index(name) for name in others if name in LABELS and header[label_at or 0] != LABELS[0]
                ]
                pairs: dict[int, set[tuple[str, str]]] = {at: set() for at in rivals}
                if others:
                    logger.warning("%s: may hold paths or labels in %s, too, not read", table, " and ".join(others))
                columns = self._columns.setdefault(table.name, Columns(self._listing.rule))
                known = {header[path_at], *PATHS, *LABELS, *([] if label_at is None else [header[label_at]])}
                may_say = [at for at, name in enumerate(header) if name not in known]
                for row in filter(None, rows):  # without blank lines
                    if len(row) != len(header):
                        raise ValueError(f"{len(row)} fields, where the header names {len(header)}")
                    said: Said = ()
                    if may_say:
                        said = columns.said((header[at], row[at].strip()) for at in may_say)
                        if len(said) < len(may_say):
                            kept = columns.alive(header)
                            may_say = [at for at in may_say if header[at] in kept]
                    label = "" if label_at is None else row[label_at].strip()
                    self._add(row[path_at].strip(), label, Part(table.name, said))
                    for at in rivals:
                        pairs[at].add((label, row[at].strip()))
                    if not label:
                        self._unlabelled[0].append(len(self.files) - 1)
                        self._unlabelled[1].append(0 if label_at is None else rows.line_num)
                for at in rivals:
                    check_same_classes(table, (header[label_at or 0], header[at]), pairs[at])
            except (ValueError, csv.Error) as error:
                raise SourceError(f"line {max(1, rows.line_num)}: {error}", path=table) from error

    def listed(self, folder: Path) -> Listed:
        """Return the rows of all tables that were read."""
        folders = list(self._folders)
        paths = Paths(folders, np.frombuffer(self._folder, np.int32), self.files)

        parts = [Part(file, self._columns[file].keep([said])[0]) for file, said in self._parts]

        def unlabelled(row: int) -> SourceError:
            rows, lines = self._unlabelled
            line, table = lines[bisect_left(rows, row)], parts[self._part[row]].file
            header = f"line 1: names no column of labels ({', '.join(LABELS)}), but {self._headers[table]}"
            return SourceError(f"line {line}: no label" if line else header, path=folder / table)

        part = np.frombuffer(self._part, np.int32)
        return Listed(parts, part, self.labels, [folders, self.files], lambda: paths, unlabelled)

    def _add(self, path: str, label: str, part: Part) -> None:
        if not path:
            raise ValueError("no path")
        folder, file = os.path.split(self._relative(path))
        self._folder.append(self._folders.setdefault(folder, len(self._folders)))
        self._part.append(self._parts.setdefault(part, len(self._parts)))
        self.files.append(file)
        self.labels.append(self._texts.setdefault(label, label))

    def _relative(self, path: str) -> str:
        """Return a path relative to the folder. Raises ValueError for a path that leaves the bounds."""
        path = os.path.normpath(path)
        if os.path.isabs(path):
            root = next((root for root in self._roots if is_inside(path, root)), None)
            path = path if root is None else os.path.relpath(path, root)
        if self.bounds is not None and (os.path.isabs(path) or path.split("/", 1)[0] == ".."):
            raise ValueError(f"{path} leads out of the source; --outside follows it")
        return path


def _lines(table: Path, file: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"has more than {MAX_LINE_BYTES} bytes")
            if b"\0" in line:
                raise ValueError("holds NUL bytes, so it is not text")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except ValueError as error:
            raise SourceError(f"line {number}: {error}", path=table) from error


def _columns(header: list[str], listing: Listing) -> tuple[int, int | None, list[str]]:
    """Return the columns of paths and of labels (None: there is none), and other candidates for them.

    Raises ValueError.
    """
    columns: list[int | None] = []
    others: list[str] = []
    meant = ("path", listing.path_column, PATHS), ("label", listing.label_column, LABELS)
    for what, chosen, usual in meant:
        names = (chosen.strip().lower(),) if chosen else usual
        named = [name for name in names if name in header]
        if not named and (what == "path" or chosen):
            there = f"{', '.join(names)}), but {', '.join(header) or 'none'}"
            advice = "" if chosen else "; say which it is with --path-column NAME"
            if len(header) == 1:
                advice = "; commas, semicolons or tabs must separate the columns"
            raise ValueError(f"names no column of {what}s ({there}{advice}")
        if named and header.count(named[0]) > 1:
            raise ValueError(f"names two columns {named[0]}")
        columns.append(header.index(named[0]) if named else None)
        others += named[1:]
    path, label = columns
    assert path is not None
    return path, label, others
