"""A CSV table of image files and labels: one file, or a folder with a table for each split.

The first row names the columns. The first name of PATHS that is there is the column of paths, and likewise with LABELS.
A column `split` says which split a row belongs to (or one of SPLITS, or one called as a split is, such as `is_valid`);
without it the file's name does (see `splits`). Paths are relative to the table's folder.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..console import format_count, printable
from ..errors import SourceError
from ..splits import split_words
from . import Source
from .files import Files
from .labels import number_labels
from .listing import Listing, is_hidden
from .paths import is_inside, opened, real_path

logger = logging.getLogger(__name__)

PATHS = ("path", "file", "filename", "image", "image_path")
LABELS = ("label", "class", "target", "category")
SPLITS = ("split", "subset", "set", "partition", "phase", "usage", "fold")
MAX_LINE_BYTES = 1 << 20  # a path has 4,096 at most


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return "csv" if path.name.lower().endswith(".csv") else None
    tables = _tables(path)
    return "csv" if tables and all(map(split_words, tables)) and any("train" in name for name in tables) else None


def _tables(folder: Path) -> list[str]:
    names = (entry.name for entry in os.scandir(folder))
    return sorted(name for name in names if name.lower().endswith(".csv") and not is_hidden(name))


def load(path: Path, kind: str, listing: Listing) -> Source:
    folder = path if path.is_dir() else path.parent
    reader = _Reader(str(folder), None if listing.outside else str(folder), listing)
    if path.is_dir():
        tables = _tables(path)
        if not tables:
            raise SourceError("holds no .csv files", path=path)
        for name in tables:
            reader.read(path / name, reader.bounds)
        named = chain([("", name) for name in tables], *(rows.places() for rows in reader.rows.values()))
        listing.left_out.add_unnamed(path, named, "named by no row")
    else:
        reader.read(path, None)  # the user named it, so it may be a link
    if not reader.rows:
        raise SourceError("holds no rows", path=path)
    picked = {
        split: _Rows.joined([reader.rows[name] for name in names])
        for split, names in listing.divide(list(reader.rows), path).items()
    }
    classes, labels = number_labels(path, {split: rows.labels for split, rows in picked.items()}, listing.labels)
    _check_rows(path, picked, {split: [classes[label] for label in of_split] for split, of_split in labels.items()})
    splits = {
        split: Files(
            root=str(folder),
            bounds=reader.bounds,
            folders=list(rows.folders),
            folder=np.array(rows.folder, np.int32),
            files=rows.files,
            labels=labels[split],
        )
        for split, rows in picked.items()
    }
    return Source(kind, classes, splits)


@dataclass
class _Rows:
    """Rows of one split."""

    folders: dict[str, int] = field(default_factory=dict)  # a folder's number by its path
    folder: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, path: str, label: str) -> None:
        """Add a row."""
        folder, file = os.path.split(path)
        self.folder.append(self.folders.setdefault(folder, len(self.folders)))
        self.files.append(file)
        self.labels.append(label)

    def places(self) -> Iterator[tuple[str, str]]:
        """Iterate over the folders and names of the files."""
        folders = list(self.folders)
        return ((folders[folder], file) for folder, file in zip(self.folder, self.files, strict=True))

    def paths(self) -> Iterator[str]:
        """Iterate over the paths."""
        return (os.path.join(*place) for place in self.places())

    @classmethod
    def joined(cls, parts: list[_Rows]) -> _Rows:
        """Join rows, in this order."""
        if len(parts) == 1:
            return parts[0]
        joined = cls()
        for part in parts:
            for path, label in zip(part.paths(), part.labels, strict=True):
                joined.add(path, label)
        return joined


def _check_rows(source: Path, splits: Mapping[str, _Rows], labels: Mapping[str, Sequence[str]]) -> None:
    """Warn of images that have two labels, or are in two splits."""

    def rows() -> Iterator[tuple[str, str, str]]:
        for name, part in splits.items():
            yield from ((path, name, label) for path, label in zip(part.paths(), labels[name], strict=True))

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
    """The rows of tables, by what says which split they belong to: the column `split`, or the table's name."""

    def __init__(self, folder: str, bounds: str | None, listing: Listing) -> None:
        self.bounds = bounds
        self.rows: dict[str, _Rows] = {}
        self._listing = listing
        self._roots = (folder, real_path(folder))  # an absolute path in the folder begins with one of them
        self._labels: dict[str, str] = {}  # one copy of each, to save memory

    def read(self, table: Path, bounds: str | None) -> None:
        """Add the rows of a table.

        Args:
            table: The file.
            bounds: The folder that it must lie in; None: any.

        Raises:
            SourceError: The table cannot be read, or names paths that lead out of the source.
        """
        with opened(str(table), bounds) as fd, open(fd, "rb", closefd=False) as file:
            rows = csv.reader(_lines(table, file), strict=True)
            try:
                header = [name.strip().lower() for name in next(rows, [])]
                *columns, others = _columns(header)
                for other in others:
                    self._listing.left_out.add(f"{table}: {other}", "a column that may hold paths or labels, too")
                for row in filter(None, rows):  # without blank lines
                    if len(row) != len(header):
                        raise ValueError(f"{len(row)} fields, where the header names {len(header)}")
                    path, label, split = ("" if at is None else row[at].strip() for at in columns)
                    self._add(path, label, table.name if columns[2] is None else self._checked(split))
            except (ValueError, csv.Error) as error:
                raise SourceError(f"line {max(1, rows.line_num)}: {error}", path=table) from error

    def _add(self, path: str, label: str, split: str) -> None:
        if not path or not label:
            raise ValueError("no label" if path else "no path")
        rows = self.rows.setdefault(split, _Rows())
        rows.add(self._relative(path), self._labels.setdefault(label, label))

    def _checked(self, split: str) -> str:
        if not split or not (split_words(split) or self._listing.rule.patterns):
            raise ValueError(f"split {split!r} is none that datapipe knows: say which it is, as --split val={split!r}, "
                             "and likewise for the others")  # fmt: skip
        return split

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


def _columns(header: list[str]) -> tuple[int, int, int | None, list[str]]:
    """Return the columns of path, label and split (None: there is no such column), and other candidates for the first.

    Raises ValueError.
    """
    columns: list[int] = []
    others: list[str] = []
    for what, names in (("path", PATHS), ("label", LABELS)):
        named = [name for name in names if name in header]
        if not named:
            raise ValueError(f"names no column of {what}s ({', '.join(names)}), but {', '.join(header) or 'none'}")
        if header.count(named[0]) > 1:
            raise ValueError(f"names two columns {named[0]}")
        columns.append(header.index(named[0]))
        others += named[1:]
    splits = [at for at, name in enumerate(header) if name in SPLITS or (at not in columns and split_words(name))]
    if len(splits) > 1:
        raise ValueError(f"names several columns of splits: {', '.join(header[at] for at in splits)}; leave one")
    return columns[0], columns[1], splits[0] if splits else None, others
