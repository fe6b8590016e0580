"""Samples that are rows of Parquet files. A row group is read as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MissingBackendError, SourceError
from ..images import Buffer

if TYPE_CHECKING:
    import pyarrow

KEPT_BYTES = 256 << 20  # of row groups, beside the one that was read last


def import_parquet(path: Path | str) -> ModuleType:
    """Import Arrow's reader. Raises MissingBackendError, which names the file, without it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingBackendError.for_extra("Parquet files need pyarrow", "parquet", path) from error
    return pyarrow.parquet


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
