"""Parquet files as Hugging Face lays them out: a column of encoded images and one of labels.

Files named train-00000-of-00294-….parquet, validation-… or test-… lie in the folder or its data/, or in folders train/
and val/, or there is one file. Images are bytes, or structs that hold them (as `bytes`). A row group is read as a
whole, so its samples are a block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SourceError
from ..images import Buffer
from . import Source
from .labels import NUMBER, number_labels
from .large_files import has_large_files, large_files
from .listing import Listing, list_at_once
from .parquet_files import ListedFile, import_parquet, list_file
from .parts import divide_samples, join_files, pick
from .shard_names import choose_files

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20  # of row groups, beside the one that was read last


def detect(path: Path) -> str | None:
    return "parquet" if has_large_files(path, (".parquet",), below=("data",)) else None


def load(path: Path, kind: str, listing: Listing) -> Source:
    import_parquet(path)
    bounds = listing.bounds(path)
    root, names = large_files(path, listing, (".parquet",), below=("data",))
    if not names:
        raise SourceError("holds no .parquet files, neither itself nor in data, train and val", path=path)
    files = choose_files(names, listing, path)
    with_paths = not all(files.values())
    tables = list_at_once(lambda name: list_file(str(root / name), bounds, listing, with_paths), files)
    by_name = dict(zip(files, tables, strict=True))
    for (column, *others), table in {
        (table.column.split(".")[0], *table.others): table for table in tables[::-1]
    }.items():
        if others:
            message = "%s: may hold images or labels in %s, too, not read: its images are those of %s"
            logger.warning(message, table.path, " and ".join(others), column)
    file_of_row = np.repeat(np.arange(len(tables)), [len(table.labels) for table in tables])

    def unlabelled(i: int, file: str) -> SourceError:
        row, table = i - int(np.argmax(file_of_row == file_of_row[i])), by_name[file]
        return SourceError(table.lack or f"row {row} has no {table.label}", path=table.path)

    paths = [path for table in tables for path in table.paths or [""] * len(table.labels)]
    listed = join_files(((name, table.labels, table.said) for name, table in by_name.items()), paths, unlabelled)
    picked = divide_samples(listed, files, listing, path)
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


def _classes(
    path: Path, tables: dict[str, list[ListedFile]], texts: dict[str, Sequence[str]], how: str
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


def _join(tables: list[ListedFile], mask: np.ndarray, labels: np.ndarray) -> ParquetRows:
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


@dataclass(eq=False)
class ParquetRows:
    """Samples that are rows of Parquet files, in their order; a row group is a block."""

    files: list[str]
    column: str  # with the images' bytes
    file: np.ndarray  # int32[G]: of each row group
    group: np.ndarray  # int32[G]: its number in its file
    start: np.ndarray  # int64[G]: its first row in the file
    image_bytes: np.ndarray  # int64[G]: of an image in it, on average
    row: np.ndarray  # int64[N]: each sample's row in its file
    labels: np.ndarray
    blocks: np.ndarray  # int64[N]: row group of each sample
    _row_groups: _RowGroups = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._row_groups = _RowGroups(self._decode)

    @property
    def names(self) -> list[str]:
        stems = [Path(file).stem for file in self.files]
        rows = zip(self.file[self.blocks].tolist(), self.row.tolist(), strict=True)
        return [f"{stems[file]}/{row:06d}" for file, row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        return f"{self.files[self.file[self.blocks[i]]]}, row {self.row[i]}"

    def size_bytes(self, i: int) -> int:
        """Return the mean size in the row group."""
        return int(self.image_bytes[self.blocks[i]])

    def read(self, i: int, buffer: memoryview) -> Buffer:
        block = int(self.blocks[i])
        value = self._row_groups.get(block)[int(self.row[i] - self.start[block])].as_buffer()
        if value is None:
            raise ValueError("holds no image: null")
        if value.size > len(buffer):
            return value.to_pybytes()
        buffer[: value.size] = memoryview(value).cast("B")
        return buffer[: value.size]

    def close(self) -> None:
        self._row_groups = _RowGroups(self._decode)

    def _decode(self, block: int) -> pyarrow.ChunkedArray:
        """Read the images of a row group, as binary."""
        path = self.files[self.file[block]]
        parquet = import_parquet(path)
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
