"""Parquet files as Hugging Face lays them out: a column of encoded images and one of labels.

Files named train-00000-of-00294-….parquet, validation-… or test-… lie in the folder or its data/, or in folders train/
and val/, or there is one file. Images are bytes, or structs that hold them (as `bytes`). A row group is read in one
piece, so its samples are a block.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import MissingBackendError, SourceError
from ..images import Buffer
from . import Samples, Source
from .labels import number_labels
from .paths import check_inside
from .splits import large_files, pick_splits

if TYPE_CHECKING:
    import pyarrow

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
LISTERS = 16  # files whose labels are read at once: hides a shared filesystem's latency
KEPT_BYTES = 256 << 20  # of row groups, beside the one read last


def detect(path: Path) -> str | None:
    return "parquet" if large_files(path, (".parquet",), below=("data",), alone=True) else None


def load(path: Path, kind: str, outside: bool) -> Source:
    _import_parquet(path)
    bounds = None if outside or not path.is_dir() else str(path)
    found = large_files(path, (".parquet",), below=("data",))
    if not found:
        raise SourceError("holds no .parquet files, neither itself nor in data, train and val", path=path)
    files = {split: found[name] for split, name in pick_splits(path, found).items()}
    with ThreadPoolExecutor(LISTERS) as pool:
        tables = {split: list(pool.map(lambda file: _list(file, bounds), of)) for split, of in files.items()}
    classes, labels = _classes(path, tables)
    splits: dict[str, Samples] = {split: _rows(files[split], of, labels[split]) for split, of in tables.items()}
    return Source(kind, classes, splits)


def _import_parquet(path: Path | str):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingBackendError.for_extra("Parquet files need pyarrow", "parquet", path) from error
    return pyarrow.parquet


# --- the listing ------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """What is known of a file without its images."""

    path: str
    column: str  # with the images' bytes
    labels: list[str]
    names: list[str]  # of the classes; empty where the file has none
    num_rows: list[int]  # of each row group
    num_bytes: list[int]  # of its images


def _list(path: str, bounds: str | None) -> _Table:
    check_inside(path, bounds)
    parquet = _import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            column, label = _columns(path, schema)
            labels = file.read(columns=[label], use_threads=False).column(label)
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's errors are these, too
        raise SourceError(f"cannot be read: {error}", path=path) from error
    if labels.null_count:
        row = labels.to_pylist().index(None)
        raise SourceError(f"row {row} has no {label}", path=path)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    num_bytes = [group.column(leaf).total_uncompressed_size for group in groups]
    texts = [str(value) for value in labels.to_pylist()]
    return _Table(path, column, texts, _class_names(schema, label), [group.num_rows for group in groups], num_bytes)


def _columns(path: str, schema: pyarrow.Schema) -> tuple[str, str]:
    """The image's bytes and the label. Raises SourceError."""
    from pyarrow import types

    image = next((name for name in IMAGES if name in schema.names), None)
    label = next((name for name in LABELS if name in schema.names), None)
    if image is None or label is None:
        wanted = f"image ({', '.join(IMAGES)}) and label ({', '.join(LABELS)})"
        raise SourceError(f"has not both columns, {wanted}, but {', '.join(schema.names)}", path=path)
    kind, column = schema.field(image).type, image
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, column = kind.field("bytes").type, f"{image}.bytes"
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise SourceError(f"column {image} holds no encoded images, but {schema.field(image).type}", path=path)
    kind = schema.field(label).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
        raise SourceError(f"column {label} holds no whole numbers or names, but {kind}", path=path)
    return column, label


def _class_names(schema: pyarrow.Schema, label: str) -> list[str]:
    """As Hugging Face's `datasets` writes them into the schema; [] where it did not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def _classes(path: Path, tables: dict[str, list[_Table]]) -> tuple[list[str], dict[str, np.ndarray]]:
    """The classes, and the labels of each split. Raises SourceError."""
    texts = {split: [text for table in of for text in table.labels] for split, of in tables.items()}
    classes, labels = number_labels(path, texts)
    first, *others = (table for of in tables.values() for table in of)
    if differing := next((table for table in others if table.names != first.names), None):
        raise SourceError(f"names other classes than {first.path}", path=differing.path)
    if first.names and classes == [str(number) for number in range(len(classes))]:
        if len(classes) > len(first.names):
            raise SourceError(f"holds the label {len(classes) - 1}, but names {len(first.names)} classes", path=path)
        classes = first.names
    return classes, labels


# --- the samples ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Rows:
    """Samples that are rows of Parquet files, in their order; a row group is a block."""

    files: list[str]
    column: str  # with the images' bytes
    file: np.ndarray  # int32[G]: of each row group
    group: np.ndarray  # int32[G]: its number in its file
    start: np.ndarray  # int64[G]: its first sample
    num_bytes: np.ndarray  # int64[G]: of its images, about
    labels: np.ndarray
    blocks: np.ndarray  # int64[N]: row group of each sample
    _kept: _Kept = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._kept = _Kept(self._decode)

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
        """The mean of the row group."""
        block = self.blocks[i]
        return int(self.num_bytes[block] // np.count_nonzero(self.blocks == block))

    def read(self, i: int, buffer: memoryview) -> Buffer:
        block = int(self.blocks[i])
        value = self._kept.get(block)[i - int(self.start[block])].as_buffer()
        if value is None:
            raise ValueError("holds no image: null")
        if value.size > len(buffer):
            return value.to_pybytes()
        buffer[: value.size] = memoryview(value).cast("B")
        return buffer[: value.size]

    def close(self) -> None:
        self._kept = _Kept(self._decode)

    def _rows(self) -> np.ndarray:
        """int64[N]: the row of each sample in its file."""
        _, first, number = np.unique(self.file, return_index=True, return_inverse=True)
        return np.arange(len(self)) - self.start[first][number][self.blocks]

    def _decode(self, block: int) -> pyarrow.ChunkedArray:
        """The images of a row group, as binary."""
        path = self.files[self.file[block]]
        parquet = _import_parquet(path)
        from pyarrow import compute

        group = int(self.group[block])
        try:
            with parquet.ParquetFile(path) as file:
                table = file.read_row_group(group, columns=[self.column], use_threads=False)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, NotImplementedError, IndexError) as error:  # Arrow's errors are these, too
            # That is never one image's fault: a disk that fails, or a file that was cut off since it was listed.
            raise SourceError(f"row group {group} cannot be read: {error}", path=path) from error
        images = table.column(0)
        return compute.struct_field(images, "bytes") if self.column.endswith(".bytes") else images


def _rows(files: list[str], tables: list[_Table], labels: np.ndarray) -> Rows:
    num_groups = [len(table.num_rows) for table in tables]
    num_rows = np.array([count for table in tables for count in table.num_rows], np.int64)
    if columns := {table.column for table in tables[1:]} - {tables[0].column}:
        raise SourceError(f"has its images in another column than {files[0]}: {', '.join(columns)}", path=files[-1])
    return Rows(
        files=files,
        column=tables[0].column,
        file=np.repeat(np.arange(len(files), dtype=np.int32), num_groups),
        group=np.concatenate([np.arange(count, dtype=np.int32) for count in num_groups]),
        start=np.cumsum(num_rows) - num_rows,
        num_bytes=np.array([size for table in tables for size in table.num_bytes], np.int64),
        labels=labels,
        blocks=np.repeat(np.arange(len(num_rows)), num_rows),
    )


class _Kept:
    """The row groups decoded last. One that several threads ask for is decoded once."""

    def __init__(self, decode: Callable[[int], pyarrow.ChunkedArray]) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._futures: dict[int, Future] = {}  # the one asked for last comes last

    def get(self, block: int) -> pyarrow.ChunkedArray:
        with self._lock:
            future = self._futures.pop(block, None)
            mine = future is None
            self._futures[block] = future = future or Future()
        if mine:
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
