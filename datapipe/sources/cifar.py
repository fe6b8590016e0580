"""CIFAR-10 and CIFAR-100: the archive or its unpacked folder, python and binary versions.

The formats are described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SourceError
from . import Source
from .file_names import is_hidden
from .listing import Listing, is_folder
from .pickled import Array, read_pickle
from .roots import class_folder
from .samples import numbered
from .unpacked import members, read_file

_SIDE = 32
_IMAGE_BYTES = 3 * _SIDE * _SIDE
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_Layout = tuple[tuple[str, ...], tuple[str, ...], str]  # files of the train split, of the test split, of class names
# By kind and version.
_LAYOUTS: dict[tuple[str, str], _Layout] = {
    ("cifar10", "python"): (_BATCHES, ("test_batch",), "batches.meta"),
    ("cifar10", "binary"): (tuple(f"{name}.bin" for name in _BATCHES), ("test_batch.bin",), "batches.meta.txt"),
    ("cifar100", "python"): (("train",), ("test",), "meta"),
    ("cifar100", "binary"): (("train.bin",), ("test.bin",), "fine_label_names.txt"),
}
_BESIDE = {"file.txt~", "coarse_label_names.txt"}  # what the archives hold, too, and no class or image
# What the archives are called, and the folders that they become.
_ARCHIVE = re.compile(r"cifar-100?-(python|binary)\.(tar|tgz|tar\.[a-z0-9]+)")
_FOLDER = re.compile(r"cifar-10-batches-(py|bin)|cifar-100-(python|binary)")
_NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
_MAX_BYTES = 1 << 30  # of all files in an archive, which has 180 MB, or of a file in a folder


def detect(path: Path) -> str | None:
    if not path.is_dir() and not path.name.lower().startswith("cifar"):  # another archive is not CIFAR's
        return None
    archive = _Archive(path)
    names = {Path(name).name for name, _ in archive.files(set())}
    kind, version = next((place for place, layout in _LAYOUTS.items() if _has(names, layout)), (None, ""))
    if (kind, version) == ("cifar100", "python") and archive.path.is_dir() and class_folder(archive.path):
        return None  # lists called train, test and meta are as likely as its files
    return kind


def _has(names: Set[str], layout: _Layout) -> bool:
    """Whether files include the class names of a layout, and some of its images."""
    train, test, meta = layout
    return meta in names and bool(names & {*train, *test})


def load(path: Path, kind: str, listing: Listing) -> Source:
    listing.refuse_options(kind)
    layouts = {version: layout for (name, version), layout in _LAYOUTS.items() if name == kind}
    archive = _Archive(path)
    content = archive.read({name for train, test, meta in layouts.values() for name in (*train, *test, meta)})
    version = next((version for version, layout in layouts.items() if _has(content.keys(), layout)), None)
    if version is None:
        raise SourceError(f"is not a {kind} archive or folder (python or binary version)", path=path)
    train, test, meta = layouts[version]
    missing = [name for name in (*train, *test) if name not in content]
    if missing:
        raise SourceError(f"is incomplete: {', '.join(missing)} missing", path=path)
    archive.count_others({*train, *test, meta}, listing)
    parse = _parse_python if version == "python" else _parse_binary
    classes = _class_names(path, kind, version, content[meta])
    splits = {}
    for split, files in (("train", train), ("val", test)):
        parts = [parse(f"{path}: {name}", kind, content[name]) for name in files]
        labels, pixels = (np.concatenate(column) for column in zip(*parts, strict=True))
        splits[split] = numbered(str(path), labels, pixels)
    return Source(kind, classes, splits)


class _Archive:
    """The files of a folder, or of a tar file.

    A folder that holds nothing but the archive, or the unpacked folder (beside the archive or not), stands for it.
    """

    def __init__(self, path: Path) -> None:
        self.source = self.path = path
        if path.is_dir():
            entries = [entry for entry in os.scandir(path) if not is_hidden(entry.name)]
            inner = [entry.name for entry in entries if entry.name.startswith("cifar-") and is_folder(entry)]
            archives = [entry.name for entry in entries if _ARCHIVE.fullmatch(entry.name)]
            if archives and not any(map(is_folder, entries)):
                inner = archives
            if len(inner) > 1 and all(_FOLDER.fullmatch(name) or _ARCHIVE.fullmatch(name) for name in inner):
                raise SourceError(f"holds several data sets, {', '.join(sorted(inner))}: give one of them", path=path)
            self.path = path / inner[0] if len(inner) == 1 else path
        self._others: set[str] = set()  # paths of what was not asked for
        self._read: Set[str] = set()

    def files(self, names: Set[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield the path of each file below the folder or in the archive, and the content of those asked for."""
        if not self.path.is_dir():
            yield from members(str(self.path), None, names, _MAX_BYTES)
            return
        with os.scandir(self.path) as entries:
            files = sorted(entry.name for entry in entries if not is_folder(entry))
        for name in files:
            is_read = name in names and (self.path / name).is_file()
            yield name, read_file(str(self.path / name), None, _MAX_BYTES) if is_read else None

    def read(self, names: Set[str]) -> dict[str, bytes]:
        """Read the files of some names, whatever folder of the archive they are in."""
        contents: dict[str, bytes] = {}
        for place, data in self.files(names):
            name = Path(place).name
            if data is None:
                self._others.add(place)
            else:
                contents[name] = data
        self._read = contents.keys()
        return contents

    def count_others(self, known: Set[str], listing: Listing) -> None:
        """Count what was not read, or is not `known`: the names of the files that images and classes come from."""
        reason = "beside the files of CIFAR"
        if self.path.is_dir():
            listing.left_out.add_entries(self.path, reason, known | _BESIDE)
        else:
            others = {*(name for name in self._others if Path(name).name not in _BESIDE), *(self._read - known)}
            listing.left_out.add_members(str(self.path), [(reason, name) for name in others])
        if self.path != self.source:
            listing.left_out.add_entries(self.source, reason, {self.path.name})


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
        if not all(type(label) is int and 0 <= label < _NUM_CLASSES[kind] for label in labels):
            raise SourceError(f"holds labels out of 0 to {_NUM_CLASSES[kind] - 1}", path=where)
        labels = np.array(labels, np.int64)
    if not isinstance(labels, np.ndarray):
        raise SourceError("holds no labels", path=where)
    return _checked(where, kind, labels, rows)


def _parse_binary(where: str, kind: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    label_bytes = 1 if kind == "cifar10" else 2  # CIFAR-100: coarse, then fine
    if len(data) % (label_bytes + _IMAGE_BYTES):
        raise SourceError(f"is truncated: {len(data)} bytes are not a whole number of records", path=where)
    records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + _IMAGE_BYTES)
    return _checked(where, kind, records[:, label_bytes - 1], records[:, label_bytes:])


def _checked(where: str, kind: str, labels: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return labels[N], and pixels as uint8[N, 32, 32, 3] from rows of 3,072 bytes: red, green and blue planes."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != (labels.size, _IMAGE_BYTES):
        raise SourceError(f"does not hold {labels.size} images of {_IMAGE_BYTES} bytes", path=where)
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.size == 0:
        raise SourceError("holds no labels", path=where)
    if not 0 <= labels.min() <= labels.max() < _NUM_CLASSES[kind]:
        raise SourceError(f"holds labels out of 0 to {_NUM_CLASSES[kind] - 1}", path=where)
    return labels, np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))


def _class_names(path: Path, kind: str, version: str, data: bytes) -> list[str]:
    if version == "python":
        field = "label_names" if kind == "cifar10" else "fine_label_names"
        names = _unpickle(f"{path}: meta", data).get(field, [])
    else:
        names = data.decode("latin1").split()
    names = [_text(name) for name in names] if isinstance(names, list) else names
    is_list = isinstance(names, list) and all(type(name) is str for name in names)
    if not is_list or len(names) != _NUM_CLASSES[kind]:
        raise SourceError(f"does not name the {_NUM_CLASSES[kind]} classes of {kind}", path=path)
    return names
