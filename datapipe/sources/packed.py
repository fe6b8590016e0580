"""A packed data set, to be put into another format: in its order, with its keys and its quarantine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..dataset import DataSet
from ..dataset.index import read_checked_keys
from ..dataset.manifest import QUARANTINE, Manifest, find_data_sets
from ..errors import ManifestError, SettingError
from ..foreign import read_regular
from ..fsio import checksum
from ..images import Buffer, pnm
from . import Samples, Source


@dataclass
class PackedSamples:
    """The samples of one data set; `folder` is where it is.

    `quarantine`: the lines of its quarantine.jsonl, on what was left out when it was packed.
    """

    folder: str
    names: list[str]
    labels: np.ndarray
    quarantine: list[str]
    blocks: None = None
    _data_set: DataSet | None = field(default=None, init=False, repr=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        return f"{self.folder}, key {self.names[i]}"

    def size_bytes(self, i: int) -> int:
        return int(self._open().index["size"][i])

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """Read the image. Raises ShardCorruptError when it is not the one that was packed."""
        data_set = self._open()
        data = data_set.read(i)
        return pnm.encode(data_set.pixels(i, data)) if data_set.raw_shape else data

    def close(self) -> None:
        with self._opening:
            if self._data_set is not None:
                self._data_set.close()
                self._data_set = None

    def _open(self) -> DataSet:
        data_set = self._data_set
        if data_set is None:
            with self._opening:
                data_set = self._data_set = self._data_set or DataSet(self.folder)
        return data_set


def load(path: Path) -> Source:
    """List the data set at `path`, or all its splits. Raises ManifestError, SettingError."""
    splits: dict[str, PackedSamples] = {}
    manifests = []
    for folder in find_data_sets(path):
        with DataSet(folder) as data_set:
            manifest, labels = data_set.manifest, data_set.index["label"].copy()
        if manifest.split in splits:
            raise SettingError(f"DIR: {path} holds two data sets of split {manifest.split!r}; convert each by itself")
        keys = read_checked_keys(folder, manifest)
        manifests.append(manifest)
        splits[manifest.split] = PackedSamples(str(folder.resolve()), keys, labels, _read_quarantine(folder, manifest))
    first = manifests[0]
    if any(manifest.classes != first.classes for manifest in manifests):
        raise SettingError(f"DIR: the splits in {path} have different classes; convert each by itself")
    return Source(first.kind, first.classes, splits, ordered=True)


def quarantined(samples: Samples) -> list[str]:
    """List what was left out before, and stays out: lines of quarantine.jsonl; none for what is not packed."""
    return samples.quarantine if isinstance(samples, PackedSamples) else []


def _read_quarantine(folder: Path, manifest: Manifest) -> list[str]:
    """Read the lines of quarantine.jsonl. Raises ManifestError."""
    if not manifest.num_bad:
        return []
    path = folder / QUARANTINE
    try:
        if checksum(path) in [file.xxh3_128 for file in manifest.files if file.name == QUARANTINE]:
            return read_regular(path).decode().splitlines()
        problem = "is not the file that was packed"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise ManifestError(problem, path=path)
