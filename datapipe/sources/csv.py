"""A CSV table of image files and labels: one file, or a folder with train.csv and val.csv or test.csv.

The first row names the columns. The first name of PATHS that is there is the column of paths, and likewise with LABELS.
A column `split` says which split a row belongs to; without it the file's name does. Paths are relative to the table's
folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import SourceError
from . import SPLITS, Source
from .files import Files
from .labels import number_labels
from .paths import is_inside, opened, real_path
from .splits import is_hidden, pick_splits

PATHS = ("path", "file", "filename", "image", "image_path")
LABELS = ("label", "class", "target", "category")
MAX_LINE_BYTES = 1 << 20  # a path has 4,096 at most


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return "csv" if path.name.lower().endswith(".csv") else None
    tables = {entry.name for entry in os.scandir(path) if entry.name.endswith(".csv") and not is_hidden(entry.name)}
    return "csv" if "train.csv" in tables and tables <= {f"{name}.csv" for name in SPLITS} else None


def load(path: Path, kind: str, outside: bool) -> Source:
    folder = path if path.is_dir() else path.parent
    listing = _Listing(str(folder), None if outside else str(folder))
    if path.is_dir():
        names = [name for name in SPLITS if f"{name}.csv" in os.listdir(path)]
        if "train" not in names:
            raise SourceError("holds no train.csv", path=path)
        for name in pick_splits(path, names).values():
            listing.read(path / f"{name}.csv", listing.bounds, name)
    else:
        listing.read(path, None, "train")  # the user named it, so it may be a link
    if not listing.splits:
        raise SourceError("holds no rows", path=path)
    picked = {split: listing.splits[name] for split, name in pick_splits(path, listing.splits).items()}
    classes, labels = number_labels(path, {split: rows.labels for split, rows in picked.items()})
    splits = {
        split: Files(
            root=str(folder),
            bounds=listing.bounds,
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
    """The rows of one split."""

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


class _Listing:
    """The rows of all tables, by the splits' names (of SPLITS)."""

    def __init__(self, folder: str, bounds: str | None) -> None:
        self.bounds = bounds
        self.splits: dict[str, _Rows] = {}
        self._roots = (folder, real_path(folder))  # an absolute path in the folder begins with one of them
        self._labels: dict[str, str] = {}  # one copy of each, to save memory

    def read(self, table: Path, bounds: str | None, split: str) -> None:
        """Add the rows of a table.

        Args:
            table: The file.
            bounds: The folder that it must lie in; None: any.
            split: The rows' split, if there is no such column.

        Raises:
            SourceError: The table cannot be read, or names paths that lead out of the source.
        """
        with opened(str(table), bounds) as fd, open(fd, "rb", closefd=False) as file:
            rows = csv.reader(_lines(table, file), strict=True)
            try:
                header = [name.strip().lower() for name in next(rows, [])]
                columns = _columns(header)
                for row in filter(None, rows):  # without blank lines
                    if len(row) != len(header):
                        raise ValueError(f"{len(row)} fields, where the header names {len(header)}")
                    self._add(*(split if at is None else row[at].strip() for at in columns))
            except (ValueError, csv.Error) as error:
                raise SourceError(f"line {max(1, rows.line_num)}: {error}", path=table) from error

    def _add(self, path: str, label: str, split: str) -> None:
        if not path or not label:
            raise ValueError("no label" if path else "no path")
        if (split := split.lower()) not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        rows = self.splits.setdefault(split, _Rows())
        rows.add(self._relative(path), self._labels.setdefault(label, label))

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


def _columns(header: list[str]) -> tuple[int, int, int | None]:
    """Return the columns of path, label and split (None: there is no such column). Raises ValueError."""
    columns: list[int] = []
    for what, names in (("path", PATHS), ("label", LABELS)):
        name = next((name for name in names if name in header), None)
        if name is None:
            raise ValueError(f"names no column of {what}s ({', '.join(names)}), but {', '.join(header) or 'none'}")
        columns.append(header.index(name))
    return columns[0], columns[1], header.index("split") if "split" in header else None
