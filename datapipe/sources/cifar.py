"""CIFAR-10 and CIFAR-100: the archive or its unpacked folder, python and binary versions.

The formats are described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SourceError
from . import Source, numbered
from .listing import Listing
from .pickled import Array, read_pickle
from .unpacked import members, read_file

SIDE = 32
IMAGE_BYTES = 3 * SIDE * SIDE
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_Layout = tuple[tuple[str, ...], tuple[str, ...], str]  # files of the train split, of the test split, of class names
# By kind and version.
LAYOUTS: dict[tuple[str, str], _Layout] = {
    ("cifar10", "python"): (BATCHES, ("test_batch",), "batches.meta"),
    ("cifar10", "binary"): (tuple(f"{name}.bin" for name in BATCHES), ("test_batch.bin",), "batches.meta.txt"),
    ("cifar100", "python"): (("train",), ("test",), "meta"),
    ("cifar100", "binary"): (("train.bin",), ("test.bin",), "fine_label_names.txt"),
}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
MAX_BYTES = 1 << 30  # of all files in an archive, which has 180 MB, or of a file in a folder


def detect(path: Path) -> str | None:
    if not path.is_dir() and not path.name.lower().startswith("cifar"):  # another archive is not CIFAR's
        return None
    names = _Archive(path).names()
    return next((kind for (kind, _), layout in LAYOUTS.items() if _has(names, layout)), None)


def _has(names: Set[str], layout: _Layout) -> bool:
    """Whether files include the class names of a layout, and some of its images."""
    train, test, meta = layout
    return meta in names and bool(names & {*train, *test})


def load(path: Path, kind: str, listing: Listing) -> Source:
    listing.refuse_options(kind)
    layouts = {version: layout for (name, version), layout in LAYOUTS.items() if name == kind}
    content = _Archive(path).read({name for train, test, meta in layouts.values() for name in (*train, *test, meta)})
    version = next((version for version, layout in layouts.items() if _has(content.keys(), layout)), None)
    if version is None:
        raise SourceError(f"is not a {kind} archive or folder (python or binary version)", path=path)
    train, test, meta = layouts[version]
    missing = [name for name in (*train, *test) if name not in content]
    if missing:
        raise SourceError(f"is incomplete: {', '.join(missing)} missing", path=path)
    parse = _parse_python if version == "python" else _parse_binary
    classes = _class_names(path, kind, version, content[meta])
    splits = {}
    for split, files in (("train", train), ("val", test)):
        parts = [parse(f"{path}: {name}", kind, content[name]) for name in files]
        labels, pixels = (np.concatenate(column) for column in zip(*parts, strict=True))
        splits[split] = numbered(str(path), labels, pixels)
    return Source(kind, classes, splits)


class _Archive:
    """The files of a folder, or of a tar file, by base name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> Set[str]:
        if self.path.is_dir():
            return {entry.name for entry in self._folder().iterdir()}
        return {Path(name).name for name, _ in members(str(self.path), None, set(), 0)}

    def read(self, names: Set[str]) -> dict[str, bytes]:
        if self.path.is_dir():
            folder = self._folder()
            paths = (folder / name for name in names if (folder / name).is_file())
            return {path.name: read_file(str(path), None, MAX_BYTES) for path in paths}
        inside = members(str(self.path), None, names, MAX_BYTES)
        return {Path(name).name: data for name, data in inside if data is not None}

    def _folder(self) -> Path:
        """Return the folder of the files: the archive's, when a folder holds nothing else."""
        inner = [path for path in self.path.iterdir() if path.name.startswith("cifar-") and path.is_dir()]
        return inner[0] if len(inner) == 1 else self.path


def _unpickle(where: str, data: bytes) -> dict:
    try:
        content = read_pickle(data)
    except ValueError as error:
        raise SourceError(f"is not a CIFAR pickle: {error}", path=where) from error
    if not isinstance(content, dict):
        raise SourceError("is not a CIFAR pickle: holds no dictionary", path=where)
    named = {_text(key): value for key, value in content.items()}
    if len(named) < len(content):
        raise SourceError("is not a CIFAR pickle: has a key twice, as text and as bytes", path=where)
    return named


def _text(value: Any) -> Any:
    """Decode bytes: what was read with encoding="bytes", as CIFAR's page says, and saved again has them for strings."""
    return value.decode("latin1") if isinstance(value, bytes) else value


def _parse_python(where: str, kind: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    content = _unpickle(where, data)
    rows, labels = content.get("data"), content.get("labels" if kind == "cifar10" else "fine_labels", [])
    try:
        rows, labels = (value.array() if isinstance(value, Array) else value for value in (rows, labels))
    except ValueError as error:
        raise SourceError(f"is not a CIFAR pickle: {error}", path=where) from error
    if isinstance(labels, list):
        if not all(type(label) is int and 0 <= label < NUM_CLASSES[kind] for label in labels):
            raise SourceError(f"holds labels out of 0 to {NUM_CLASSES[kind] - 1}", path=where)
        labels = np.array(labels, np.int64)
    if not isinstance(labels, np.ndarray):
        raise SourceError("holds no labels", path=where)
    return _checked(where, kind, labels, rows)


def _parse_binary(where: str, kind: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    label_bytes = 1 if kind == "cifar10" else 2  # CIFAR-100: coarse, then fine
    if len(data) % (label_bytes + IMAGE_BYTES):
        raise SourceError(f"is truncated: {len(data)} bytes are not a whole number of records", path=where)
    records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + IMAGE_BYTES)
    return _checked(where, kind, records[:, label_bytes - 1], records[:, label_bytes:])


def _checked(where: str, kind: str, labels: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return labels[N], and pixels as uint8[N, 32, 32, 3] from rows of 3,072 bytes: red, green and blue planes."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != (labels.size, IMAGE_BYTES):
        raise SourceError(f"does not hold {labels.size} images of {IMAGE_BYTES} bytes", path=where)
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.size == 0:
        raise SourceError("holds no labels", path=where)
    if not 0 <= labels.min() <= labels.max() < NUM_CLASSES[kind]:
        raise SourceError(f"holds labels out of 0 to {NUM_CLASSES[kind] - 1}", path=where)
    return labels, np.ascontiguousarray(rows.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _class_names(path: Path, kind: str, version: str, data: bytes) -> list[str]:
    if version == "python":
        field = "label_names" if kind == "cifar10" else "fine_label_names"
        names = _unpickle(f"{path}: meta", data).get(field, [])
    else:
        names = data.decode("latin1").split()
    names = [_text(name) for name in names] if isinstance(names, list) else names
    is_list = isinstance(names, list) and all(type(name) is str for name in names)
    if not is_list or len(names) != NUM_CLASSES[kind]:
        raise SourceError(f"does not name the {NUM_CLASSES[kind]} classes of {kind}", path=path)
    return names
