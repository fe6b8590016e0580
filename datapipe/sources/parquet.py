"""Parquet files as Hugging Face lays them out: a column of encoded images and one of labels.

Files named train-00000-of-00294-….parquet, validation-… or test-… lie in the folder or its data/, or in folders train/
and val/, or there is one file. Images are bytes, or structs that hold them (as `bytes`). A row group is read as a
whole, so its samples are a block.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import MissingBackendError, SourceError
from ..images import Buffer
from . import Source
from .labels import NUMBER, number_labels
from .large_files import has_large_files, large_files
from .listing import Listing
from .paths import check_inside

if TYPE_CHECKING:
    import pyarrow

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
SPLITS = ("split", "subset", "partition")
LISTERS = 16  # files whose labels are read at once: hides a shared filesystem's latency
KEPT_BYTES = 256 << 20  # of row groups, beside the one that was read last


def detect(path: Path) -> str | None:
    return "parquet" if has_large_files(path, (".parquet",), below=("data",)) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    _import_parquet(path)
    bounds = None if listing.outside or not path.is_dir() else str(path)
    files = large_files(path, listing, (".parquet",), below=("data",))
    if not files:
        raise SourceError("holds no .parquet files, neither itself nor in data, train and val", path=path)
    with ThreadPoolExecutor(LISTERS) as pool:
        tables = {split: list(pool.map(lambda file: _list(file, bounds), paths)) for split, paths in files.items()}
    for table in (table for of_split in tables.values() for table in of_split):
        for column in table.others:
            listing.left_out.add(f"{table.path}: {column}", "a column that may hold images or labels, too")
        if table.split_column and not listing.rule.patterns:
            raise SourceError(
                f"has a column {table.split_column}, and rows are not divided by it: write a file for each split, or "
                "say with --split train=PATTERN and --split val=PATTERN what the files are",
                path=table.path,
            )
    classes, labels = _classes(path, tables, listing.labels)
    splits = {split: _join(files[split], listed, labels[split]) for split, listed in tables.items()}
    return Source(kind, classes, splits)


def _import_parquet(path: Path | str) -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingBackendError.for_extra("Parquet files need pyarrow", "parquet", path) from error
    return pyarrow.parquet


# --- the listing ------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A file, without its images."""

    path: str
    column: str  # with the images' bytes
    labels: list[str]
    names: list[str]  # of the classes; empty if the file has none
    num_rows: list[int]  # of each row group
    num_bytes: list[int]  # of its images
    others: list[str]  # columns that may hold images or labels, too
    split_column: str | None


def _list(path: str, bounds: str | None) -> _Table:
    check_inside(path, bounds)
    parquet = _import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            column, label = _columns(path, schema)
            labels = file.read(columns=[label], use_threads=False).column(label)
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's errors are subclasses
        raise SourceError(f"cannot be read: {error}", path=path) from error
    if labels.null_count:
        row = labels.to_pylist().index(None)
        raise SourceError(f"row {row} has no {label}", path=path)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    num_bytes = [group.column(leaf).total_uncompressed_size for group in groups]
    texts = [str(value) for value in labels.to_pylist()]
    others = [name for name in (*IMAGES, *LABELS) if name in schema.names and name not in (column.split(".")[0], label)]
    split_column = next((name for name in schema.names if name in SPLITS and name not in (column, label)), None)
    num_rows = [group.num_rows for group in groups]
    return _Table(path, column, texts, _class_names(schema, label), num_rows, num_bytes, others, split_column)


def _columns(path: str, schema: pyarrow.Schema) -> tuple[str, str]:
    """Return the columns of the images' bytes and of the labels. Raises SourceError."""
    from pyarrow import types

    image = next((name for name in IMAGES if name in schema.names), None)
    label = next((name for name in LABELS if name in schema.names), None)
    if image is None or label is None:
        expected = f"image ({', '.join(IMAGES)}) and label ({', '.join(LABELS)})"
        raise SourceError(f"has not both columns, {expected}, but {', '.join(schema.names)}", path=path)
    kind, column = schema.field(image).type, image
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, column = kind.field("bytes").type, f"{image}.bytes"
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise SourceError(f"column {image} holds no encoded images, but {schema.field(image).type}", path=path)
    kind = schema.field(label).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_string(kind) or types.is_large_string(kind)):
        raise SourceError(f"column {label} holds no whole numbers or names, but {kind}", path=path)
    return column, label


def _class_names(schema: pyarrow.Schema, label: str) -> list[str]:
    """Return the class names that Hugging Face's `datasets` has written into the schema; [] if it has not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def _classes(path: Path, tables: dict[str, list[_Table]], how: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the classes, and the labels of each split. Raises SourceError. `how`: see `number_labels`."""
    texts = {split: [text for table in of_split for text in table.labels] for split, of_split in tables.items()}
    first, *others = (table for of_split in tables.values() for table in of_split)
    if first.names and how == "auto" and all(map(NUMBER.fullmatch, set().union(*texts.values()))):
        how = "numbers"  # of the names that the file gives: classes without images are meant
    classes, labels = number_labels(path, texts, how)
    if differing := next((table for table in others if table.names != first.names), None):
        raise SourceError(f"names other classes than {first.path}", path=differing.path)
    if first.names and classes == [str(number) for number in range(len(classes))]:
        if len(classes) > len(first.names):
            raise SourceError(f"holds the label {len(classes) - 1}, but names {len(first.names)} classes", path=path)
        classes = first.names
    return classes, labels


# --- the samples ------------------------------------------------------------------------------------


@dataclass(eq=False)
class ParquetRows:
    """Samples that are rows of Parquet files, in their order; a row group is a block."""

    files: list[str]
    column: str  # with the images' bytes
    file: np.ndarray  # int32[G]: of each row group
    group: np.ndarray  # int32[G]: its number in its file
    start: np.ndarray  # int64[G]: its first sample
    num_bytes: np.ndarray  # int64[G]: of its images, about
    labels: np.ndarray
    blocks: np.ndarray  # int64[N]: row group of each sample
    _row_groups: _RowGroups = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._row_groups = _RowGroups(self._decode)

    @property
    def names(self) -> list[str]:
        stems = [Path(file).stem for file in self.files]
        rows = zip(self.file[self.blocks].tolist(), self._rows().tolist(), strict=True)
        return [f"{stems[file]}/{row:06d}" for file, row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        return f"{self.files[self.file[self.blocks[i]]]}, row {self._rows()[i]}"

    def size_bytes(self, i: int) -> int:
        """Return the mean size in the row group."""
        block = self.blocks[i]
        return int(self.num_bytes[block] // np.count_nonzero(self.blocks == block))

    def read(self, i: int, buffer: memoryview) -> Buffer:
        block = int(self.blocks[i])
        value = self._row_groups.get(block)[i - int(self.start[block])].as_buffer()
        if value is None:
            raise ValueError("holds no image: null")
        if value.size > len(buffer):
            return value.to_pybytes()
        buffer[: value.size] = memoryview(value).cast("B")
        return buffer[: value.size]

    def close(self) -> None:
        self._row_groups = _RowGroups(self._decode)

    def _rows(self) -> np.ndarray:
        """Return int64[N], the row of each sample in its file."""
        _, first, number = np.unique(self.file, return_index=True, return_inverse=True)
        return np.arange(len(self)) - self.start[first][number][self.blocks]

    def _decode(self, block: int) -> pyarrow.ChunkedArray:
        """Read the images of a row group, as binary."""
        path = self.files[self.file[block]]
        parquet = _import_parquet(path)
        from pyarrow import compute

        group = int(self.group[block])
        try:
            with parquet.ParquetFile(path) as file:
                table = file.read_row_group(group, columns=[self.column], use_threads=False)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, NotImplementedError, IndexError) as error:  # Arrow's errors are subclasses
            # Never the fault of one image: the disk fails, or the file has been truncated since it was listed.
            raise SourceError(f"row group {group} cannot be read: {error}", path=path) from error
        images = table.column(0)
        return compute.struct_field(images, "bytes") if self.column.endswith(".bytes") else images


def _join(files: list[str], tables: list[_Table], labels: np.ndarray) -> ParquetRows:
    num_groups = [len(table.num_rows) for table in tables]
    num_rows = np.array([count for table in tables for count in table.num_rows], np.int64)
    if columns := {table.column for table in tables[1:]} - {tables[0].column}:
        raise SourceError(f"has its images in another column than {files[0]}: {', '.join(columns)}", path=files[-1])
    return ParquetRows(
        files=files,
        column=tables[0].column,
        file=np.repeat(np.arange(len(files), dtype=np.int32), num_groups),
        group=np.concatenate([np.arange(count, dtype=np.int32) for count in num_groups]),
        start=np.cumsum(num_rows) - num_rows,
        num_bytes=np.array([size for table in tables for size in table.num_bytes], np.int64),
        labels=labels,
        blocks=np.repeat(np.arange(len(num_rows)), num_rows),
    )


class _RowGroups:
    """The row groups that were decoded last. One that several threads ask for is decoded once."""

    def __init__(self, decode: Callable[[int], pyarrow.ChunkedArray]) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._futures: dict[int, Future] = {}  # in the order in which they were last asked for

    def get(self, block: int) -> pyarrow.ChunkedArray:
        with self._lock:
            future = self._futures.pop(block, None)
            is_new = future is None
            self._futures[block] = future = future or Future()
        if is_new:
            try:
                future.set_result(self._decode(block))
            except BaseException as error:
                with self._lock:
                    self._futures.pop(block, None)
                future.set_exception(error)
            self._drop()
        return future.result()

    def _drop(self) -> None:
        with self._lock:
            sizes = {block: future.result().nbytes for block, future in self._futures.items() if future.done()}
            total = sum(sizes.values())
            for block in list(sizes)[:-1]:
                if total > KEPT_BYTES:
                    del self._futures[block]
                    total -= sizes[block]
