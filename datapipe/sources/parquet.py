"""Parquet files as Hugging Face lays them out: a column of encoded images and one of labels.

Files named train-00000-of-00294-….parquet, validation-… or test-… lie in the folder or its data/, or in folders train/
and val/, or there is one file. Images are bytes, or structs that hold them (as `bytes`). A row group is read as a
whole, so its samples are a block.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import SourceError
from ..splits import SplitRule
from . import Source
from .labels import NUMBER, check_same_classes, number_labels
from .large_files import has_large_files, large_files
from .listing import Listing
from .parquet_columns import (
    PATHS,
    STRINGS,
    class_names,
    describe_lack,
    find_columns,
    other_columns,
    path_column,
    rival_columns,
)
from .parquet_rows import ParquetRows, import_parquet
from .parts import Listed, choose_files, divide, pick
from .paths import check_inside
from .split_columns import Columns, Part, Said
from .split_paths import Paths

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

LISTERS = 16  # files whose labels are read at once: hides a shared filesystem's latency


def detect(path: Path) -> str | None:
    return "parquet" if has_large_files(path, (".parquet",), below=("data",)) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    import_parquet(path)
    bounds = None if listing.outside or not path.is_dir() else str(path)
    root, names = large_files(path, listing, (".parquet",), below=("data",))
    if not names:
        raise SourceError("holds no .parquet files, neither itself nor in data, train and val", path=path)
    files = choose_files(names, listing, path)
    with_paths = not all(files.values())
    with ThreadPoolExecutor(LISTERS) as pool:
        tables = list(pool.map(lambda name: _list(str(root / name), name, bounds, listing, with_paths), files))
    for (column, *others), table in {
        (table.column.split(".")[0], *table.others): table for table in tables[::-1]
    }.items():
        if others:
            message = "%s: may hold images or labels in %s, too, not read: its images are those of %s"
            logger.warning(message, table.path, " and ".join(others), column)
    listed = _join_listed(tables)
    picked = divide(listed, files, listing, path)
    file_of_row = np.repeat(np.arange(len(tables)), [len(table.labels) for table in tables])
    used = {split: np.unique(file_of_row[rows]).tolist() for split, rows in picked.items()}
    texts = {split: pick(listed.labels, rows) for split, rows in picked.items()}
    named = {split: [tables[number] for number in numbers] for split, numbers in used.items()}
    classes, labels = _classes(path, named, texts, listing.labels)
    splits = {}
    for split, rows in picked.items():
        of_split = np.zeros(len(file_of_row), bool)
        of_split[rows] = True
        splits[split] = _join(named[split], of_split[np.isin(file_of_row, used[split])], labels[split])
    return Source(kind, classes, splits)


class _Table(NamedTuple):
    """A file, without its images."""

    path: str
    name: str  # below the source
    column: str  # with the images' bytes
    label: str | None  # the column; None: it has none
    labels: list[str]  # "": none
    classes: list[str]  # their names; empty if the file has none
    num_rows: list[int]  # of each row group
    num_bytes: list[int]  # of its images
    others: list[str]  # columns that may hold images or labels, too
    said: list[Said]  # of each row's split; empty: nothing
    paths: list[str]  # of the images, as the file gives them; empty: it does not, or they are not asked for
    lack: str  # what to say where its labels are needed, and it has none


def _list(path: str, name: str, bounds: str | None, listing: Listing, with_paths: bool) -> _Table:
    label_column = listing.label_column
    check_inside(path, bounds)
    parquet = import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            column, label = find_columns(path, schema, label_column)
            labels = _texts(file, label) if label else [""] * metadata.num_rows
            for other in () if label_column else rival_columns(schema, label):
                check_same_classes(path, (label or "", other), set(zip(labels, _texts(file, other), strict=True)))
            said = _said(file, listing.rule, {column.split(".")[0], label, *PATHS})
            of_paths = path_column(schema) if with_paths else None
            paths = _texts(file, of_paths) if of_paths else []
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's errors are subclasses
        raise SourceError(f"cannot be read: {error}", path=path) from error
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    num_bytes = [group.column(leaf).total_uncompressed_size for group in groups]
    others = other_columns(schema, column, label, label_column)
    lack = "" if label else describe_lack(schema, label_column)
    num_rows, classes = [group.num_rows for group in groups], class_names(schema, label)
    return _Table(path, name, column, label, labels, classes, num_rows, num_bytes, others, said, paths, lack)


def _texts(file: pyarrow.parquet.ParquetFile, column: str, group: int | None = None) -> list[str]:
    """Read a column, or a field of one (`image.path`), of a row group or of all, as texts; "" for null."""
    from pyarrow import compute

    groups = range(file.num_row_groups) if group is None else [group]
    values = file.read_row_groups(groups, columns=[column], use_threads=False).column(0)
    for part in column.split(".")[1:] if column not in file.schema_arrow.names else ():
        values = compute.struct_field(values, part)
    texts = (value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values.to_pylist())
    return ["" if value is None else str(value) for value in texts]


def _said(file: pyarrow.parquet.ParquetFile, rule: SplitRule, others: Set[str | None]) -> list[Said]:
    """List what a file's columns, except some others, say of each row's split; nothing: [].

    Of a column of texts, the first row group often tells that it says nothing: the others are not read.
    """
    from pyarrow import types

    schema, columns, values = file.schema_arrow, Columns(rule), {}
    for name, kind in _fields((field.name, field.type) for field in schema if field.name not in others):
        is_named = columns.is_named(name)
        if is_named and (types.is_list(kind) or types.is_large_list(kind)):
            kind = kind.value_type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        is_simple = types.is_primitive(kind) or str(kind).endswith("binary")
        if not (str(kind) in STRINGS or (is_named and is_simple) or class_names(schema, name)):
            continue
        texts: list[str] = []
        for group in range(file.metadata.num_row_groups):
            of_group = _named(schema, name, _texts(file, name, group))
            if not columns.may_be(name, dict.fromkeys(of_group)):
                break
            texts += of_group
        else:
            values[name] = texts
    rows = zip(*values.values(), strict=True)
    return columns.keep([columns.said(zip(values, row, strict=True)) for row in rows])


def _fields(columns: Iterable[tuple[str, pyarrow.DataType]]) -> Iterator[tuple[str, pyarrow.DataType]]:
    """List columns' names and types, those of structs by field, as `meta.split`."""
    from pyarrow import types

    for name, kind in columns:
        if types.is_struct(kind):
            yield from _fields((f"{name}.{field.name}", field.type) for field in kind)
        else:
            yield name, kind


def _named(schema: pyarrow.Schema, column: str, texts: list[str]) -> list[str]:
    """Replace numbers by names, where Hugging Face's `datasets` has written these into the schema."""
    names = class_names(schema, column)
    return [names[int(text)] if text.isdecimal() and int(text) < len(names) else text for text in texts]


def _join_listed(tables: list[_Table]) -> Listed:
    parts: dict[Part, int] = {}
    part = [np.zeros(0, np.int32)]
    for table in tables:
        if table.said:
            part.append(
                np.array([parts.setdefault(Part(table.name, said), len(parts)) for said in table.said], np.int32)
            )
        elif table.labels:
            part.append(np.full(len(table.labels), parts.setdefault(Part(table.name), len(parts)), np.int32))
    paths = [path for table in tables for path in table.paths or [""] * len(table.labels)]
    labels = [label for table in tables for label in table.labels]

    def unlabelled(i: int) -> SourceError:
        for table in tables:
            if i < len(table.labels):
                break
            i -= len(table.labels)
        return SourceError(table.lack or f"row {i} has no {table.label}", path=table.path)

    return Listed(list(parts), np.concatenate(part), labels, [paths], lambda: Paths.from_texts(paths), unlabelled)


def _classes(
    path: Path, tables: dict[str, list[_Table]], texts: dict[str, Sequence[str]], how: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the classes, and the labels of each split. Raises SourceError. `how`: see `number_labels`."""
    first, *others = (table for of_split in tables.values() for table in of_split)
    if first.classes and how == "auto" and all(map(NUMBER.fullmatch, set().union(*texts.values()))):
        how = "numbers"  # of the names that the file gives: classes without images are meant
    classes, labels = number_labels(path, texts, how)
    if differing := next((table for table in others if table.classes != first.classes), None):
        raise SourceError(f"names other classes than {first.path}", path=differing.path)
    if first.classes and classes == [str(number) for number in range(len(classes))]:
        if len(classes) > len(first.classes):
            message = f"holds the label {len(classes) - 1}, but names {len(first.classes)} classes"
            raise SourceError(message, path=path)
        classes = first.classes
    return classes, labels


def _join(tables: list[_Table], mask: np.ndarray, labels: np.ndarray) -> ParquetRows:
    """Join those rows of some files that a mask, bool[rows of all], picks; the labels are theirs."""
    first, last = tables[0], tables[-1]
    if columns := {table.column for table in tables} - {first.column}:
        raise SourceError(f"has its images in another column than {first.path}: {', '.join(columns)}", path=last.path)
    num_groups = [len(table.num_rows) for table in tables]
    num_rows = np.array([count for table in tables for count in table.num_rows], np.int64)
    num_bytes = np.array([size for table in tables for size in table.num_bytes], np.int64)
    starts = [np.cumsum([0, *table.num_rows[:-1]])[: len(table.num_rows)] for table in tables]
    rows = [np.arange(sum(table.num_rows), dtype=np.int64) for table in tables]
    return ParquetRows(
        files=[table.path for table in tables],
        column=first.column,
        file=np.repeat(np.arange(len(tables), dtype=np.int32), num_groups),
        group=np.concatenate([np.arange(count, dtype=np.int32) for count in num_groups]),
        start=np.concatenate(starts).astype(np.int64),
        image_bytes=num_bytes // np.maximum(1, num_rows),
        row=np.concatenate(rows)[mask],
        labels=labels,
        blocks=np.repeat(np.arange(len(num_rows)), num_rows)[mask],
    )
