"""A CSV table of image files and labels: one file, or a folder with a table for each split.

How its text is read, and which columns are of paths and labels, says `tables`. A column of splits says which split a
row belongs to, or the file's name, or else the paths (see `parts`). Paths begin in the table's folder; `named_images`
finds the images of those that do not.
"""

from __future__ import annotations

import logging
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ..console import format_count, format_some, printable
from ..errors import SourceError
from ..split_names import TRAIN, own_splits, split_words, splits_of
from ..splits import AmbiguousSplitError
from . import Source
from .file_names import TEXT_TABLES
from .labels import check_same_classes, number_labels
from .listing import Listing
from .named_images import NamedImages, describe_doubt, lists_of_rows
from .parts import Listed, divide_samples, pick
from .paths import is_inside, open_checked, real_path
from .samples import Files
from .shard_names import choose_files
from .split_columns import Columns, Part, Said
from .split_paths import Paths
from .tables import LABELS, PATHS, Header, find_columns, read_rows, tables_in

logger = logging.getLogger(__name__)

_LEADS_OUT = "leads out of the source; --outside follows it"
_LOOKED_AT = 8  # rows of a table, to see which columns are which, and whether paths name files


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return "csv" if path.name.lower().endswith(TEXT_TABLES) else None
    splits = list(map(splits_of, tables_in(path)))
    return "csv" if splits and all(splits) and TRAIN in set().union(*splits) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    folder = path if path.is_dir() else path.parent
    reader = _Reader(str(folder), listing.bounds(folder), listing)
    tables = tables_in(path) if path.is_dir() else [path.name]
    if not tables:
        raise SourceError("holds no .csv or .tsv files", path=path)
    files = choose_files(tables, listing, path)
    for name in files:
        reader.read(folder / name, reader.bounds if path.is_dir() else None)  # one that the user named may be a link
    if not reader.files:
        raise SourceError("holds no rows", path=path)
    listed = reader.listed(folder)
    picked = divide_samples(listed, files, listing, path)
    if list(picked) == [TRAIN] and not (listing.rule.patterns or own_splits(path) or any(map(split_words, files))):
        _check_lists(path, folder, reader.files)
    texts = {split: pick(reader.labels, rows) for split, rows in picked.items()}
    classes, labels = number_labels(path, texts, listing.labels)
    paths = listed.paths()
    if path.is_dir():
        places = zip((paths.folders[number] for number in paths.folder.tolist()), paths.files, strict=True)
        listing.left_out.add_unnamed(path, chain([("", name) for name in tables], places), "named by no row")
    splits = {}
    for split, rows in picked.items():
        reader.check_images(path, rows)
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


def _check_lists(source: Path, folder: Path, images: Iterable[str]) -> None:
    """Raise AmbiguousSplitError for lists beside a table that may say which of its images are for training."""
    if lists := lists_of_rows(folder, images):
        why = f"says nothing of splits, and {format_some(lists)} may say which images are for training"
        raise AmbiguousSplitError(
            source, why, "if so, add a column split with train or val in each row; if all are, type --split train=."
        )


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
        self._headers: dict[str, Header] = {}  # of each table
        self._listing = listing
        self._roots = (folder, real_path(folder))  # an absolute path in the folder begins with one of them
        self._texts: dict[str, str] = {}  # one copy of each label, to save memory
        self._images = NamedImages(folder, bounds)
        self._leading_out: tuple[int, str] | None = None  # line and path of a table's first that is not in the bounds
        self._doubtful: dict[int, tuple[str, list[str]]] = {}  # rows whose name is not one image's: what it may mean

    def read(self, table: Path, bounds: str | None) -> None:
        """Add the rows of a table, which must lie in `bounds`. Raises SourceError."""
        first_row = len(self.files)
        self._leading_out = None
        with open_checked(str(table), bounds) as fd, open(fd, "rb", closefd=False) as file:
            rows = read_rows(table, file)
            first = list(islice(rows, 1 + _LOOKED_AT))
            try:
                header = find_columns([row for _, row in first], self._listing, self._count_images)
            except ValueError as error:
                raise SourceError(f"line 1: {error}", path=table) from error
            self._headers[table.name] = header
            if not header.is_named or not (self._listing.path_column or header.names[header.path] in PATHS):
                logger.info("%s: %s", table, header.describe())
            if header.others:
                logger.warning("%s: may hold paths or labels in %s, too, not read", table, " and ".join(header.others))
            self._add_rows(table, header, chain(first[header.is_named :], rows))
        if not self._find_images(table, first_row) and self._leading_out:
            line, path = self._leading_out
            why = _LEADS_OUT if os.path.lexists(path) else "leads out of the source, and names no file there"
            raise SourceError(f"line {line}: {path} {why}", path=table)

    def _add_rows(self, table: Path, header: Header, rows: Iterable[tuple[int, list[str]]]) -> None:
        names, path_at, label_at = header.names, header.path, header.label
        rivals = [names.index(name) for name in header.others if name in LABELS and names[label_at or 0] != LABELS[0]]
        pairs: dict[int, set[tuple[str, str]]] = {at: set() for at in rivals}
        columns = self._columns.setdefault(table.name, Columns(self._listing.rule))
        known = {names[path_at], *PATHS, *LABELS, *([] if label_at is None else [names[label_at]])}
        may_say = [at for at, name in enumerate(names) if name not in known]
        for line, row in rows:
            if len(row) != len(names):
                what = "the header names" if header.is_named else "the first row has"
                raise SourceError(f"line {line}: {len(row)} fields, where {what} {len(names)}", path=table)
            said: Said = ()
            if may_say:
                said = columns.said((names[at], row[at].strip()) for at in may_say)
                if len(said) < len(may_say):
                    kept = columns.alive(names)
                    may_say = [at for at in may_say if names[at] in kept]
            label = "" if label_at is None else row[label_at].strip()
            try:
                path = self._add(row[path_at].strip(), label, Part(table.name, said))
            except ValueError as error:
                raise SourceError(f"line {line}: {error}", path=table) from error
            if self.bounds is not None and os.path.isabs(path):
                self._leading_out = self._leading_out or (line, path)
            for at in rivals:
                pairs[at].add((label, row[at].strip()))
            if not label:
                self._unlabelled[0].append(len(self.files) - 1)
                self._unlabelled[1].append(0 if label_at is None else line)
        for at in rivals:
            check_same_classes(table, (names[label_at or 0], names[at]), pairs[at])

    def _find_images(self, table: Path, start: int) -> bool:
        """Replace the names in a table's rows, from `start`, by the images' paths, if none of the first is a path.

        Returns whether they were replaced.
        """
        folders = list(self._folders)

        def list_names(end: int | None) -> list[str]:
            pairs = zip(self._folder[start:end], self.files[start:end], strict=True)
            return [os.path.join(folders[at], file) for at, file in pairs]

        first = list_names(start + _LOOKED_AT)
        if not first or any(os.path.lexists(os.path.join(self._roots[0], name)) for name in first):
            return False
        names = list_names(None)
        matches = self._images.find(names, table.name)
        clear = {name: places[0] for name, places in zip(names, matches, strict=True) if len(places) == 1}
        if not any(matches) and (advice := self._images.advise(names[0])):
            raise SourceError(advice, path=table)
        if not any(matches) or all(name == place for name, place in clear.items()):
            return False  # packing reports each that is missing as a bad image
        example = next(name for name in clear if name != clear[name])
        logger.info("%s: its rows name images below its folder: %s is %s", table, example, clear[example])
        for row, (name, places) in enumerate(zip(names, matches, strict=True), start):
            if name in clear:
                inner, self.files[row] = os.path.split(clear[name])
                self._folder[row] = self._folders.setdefault(inner, len(self._folders))
            else:
                self._doubtful[row] = (name, places)
        return True

    def _count_images(self, cells: Sequence[str]) -> int:
        return sum(map(bool, self._images.find(cells)))

    def check_images(self, source: Path, rows: np.ndarray) -> None:
        """Raise SourceError if some rows, int64[M], name no image, or may name several, where the others name one."""
        matches = dict(self._doubtful[row] for row in rows.tolist() if row in self._doubtful)
        if matches:
            raise SourceError(describe_doubt(matches, len(rows)), path=source)

    def listed(self, folder: Path) -> Listed:
        """Return the rows of all tables that were read."""
        named = list(self._folders)
        used, numbers = np.unique(np.frombuffer(self._folder, np.int32), return_inverse=True)
        folders = [named[number] for number in used.tolist()]  # without those that names have, and the images not
        paths = Paths(folders, numbers.astype(np.int32), self.files)

        parts = [Part(file, self._columns[file].keep([said])[0]) for file, said in self._parts]

        def unlabelled(row: int) -> SourceError:
            rows, lines = self._unlabelled
            line, table = lines[bisect_left(rows, row)], parts[self._part[row]].file
            lack = self._headers[table].describe_lack(self._listing.label_column)
            return SourceError(f"line {line or 1}: {'no label' if line else lack}", path=folder / table)

        part = np.frombuffer(self._part, np.int32)
        return Listed(parts, part, self.labels, [folders, self.files], lambda: paths, unlabelled)

    def _add(self, path: str, label: str, part: Part) -> str:
        """Add a row, and return its path as `_relative` does."""
        if not path:
            raise ValueError("no path")
        path = self._relative(path)
        folder, file = os.path.split(path)
        self._folder.append(self._folders.setdefault(folder, len(self._folders)))
        self._part.append(self._parts.setdefault(part, len(self._parts)))
        self.files.append(file)
        self.labels.append(self._texts.setdefault(label, label))
        return path

    def _relative(self, path: str) -> str:
        """Return a path relative to the folder, unless it is absolute and not there. Raises ValueError for `../`."""
        path = os.path.normpath(path)
        if os.path.isabs(path):
            root = next((root for root in self._roots if is_inside(path, root)), None)
            path = path if root is None else os.path.relpath(path, root)
        if self.bounds is not None and path.split("/", 1)[0] == "..":
            raise ValueError(f"{path} {_LEADS_OUT}")
        return path
