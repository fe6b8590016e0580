"""Check a packed data set against its checksums and, if asked, decode every image."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .. import watched
from ..checks import check_seconds
from ..console import Progress, format_count
from ..errors import DatapipeError, ManifestError
from ..foreign import open_regular
from ..fsio import checksum
from ..images.codec import check_image
from ..watched import TIMEOUT_S, work_on_files
from . import DataSet
from .index import ENCODINGS, read_checked_keys
from .manifest import KEYS, FileInfo, ShardInfo

GROUP = 256  # samples decoded per task
_CORES = os.cpu_count() or 1  # threads at work


@dataclass(frozen=True)
class Problem:
    """Something wrong in a file of the data set.

    Attributes:
        file: Name of the file.
        key: The sample's key; None if it is not about a single sample.
        reason: Description of what is wrong.
        is_lost: Whether the file cannot be opened, and nothing can be said of its samples.
    """

    file: str
    key: str | None
    reason: str
    is_lost: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {f'key {self.key}: ' if self.key else ''}{self.reason}"


def verify(folder: Path, deep: bool = False, timeout_s: float = TIMEOUT_S) -> list[Problem]:
    """Check one data set.

    A file with a wrong checksum is searched for the samples that are damaged.

    Args:
        folder: Folder of the data set.
        deep: Whether to decode every image too, as strictly as `pack` with check="decode", and compare its header with
            the index.
        timeout_s: Longest time that a read may take, in seconds, above 0.

    Returns:
        All that is wrong; an empty list means that every file has its checksum. When manifest or index cannot be read,
        that is the only problem.

    Raises:
        DatapipeError: A read takes longer than `timeout_s`.
        SettingError: `timeout_s` is out of range.
    """
    check_seconds("timeout_s", timeout_s)
    try:
        data_set = watched.call(lambda: DataSet(folder), timeout_s, folder)
    except ManifestError as error:
        return [Problem(Path(error.path or folder).name, None, error.message)]
    with data_set:
        files = list(data_set.manifest.all_files())
        problems: list[Problem] = []
        check = partial(_check_file, data_set)
        in_files = work_on_files(check, files, lambda file: data_set.folder / file.name, timeout_s, _CORES)
        with closing(in_files), Progress(f"verifying {folder}", data_set.manifest.size_bytes, "B") as progress:
            for file, in_file in zip(files, in_files, strict=True):
                problems += in_file
                progress.advance(file.size_bytes)
        if deep:
            known = {problem.key for problem in problems}
            lost = {problem.file for problem in problems if problem.is_lost}
            problems += [problem for problem in _decode_all(data_set, lost, timeout_s) if problem.key not in known]
    return problems


def _check_file(data_set: DataSet, file: FileInfo, moved: Callable[[], None]) -> list[Problem]:
    if reason := _wrong_bytes(data_set.folder / file.name, file, moved):
        return list(_damaged_samples(data_set, file, reason, moved))
    try:
        if file.name == KEYS:
            read_checked_keys(data_set.folder, data_set.manifest)
    except ManifestError as error:
        return [Problem(KEYS, None, error.message)]
    return []


def _wrong_bytes(path: Path, file: FileInfo, moved: Callable[[], None]) -> str | None:
    """Say why a file is not the one that was packed; None if it is."""
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"has {size} bytes, expected {file.size_bytes}"
        actual = checksum(path, moved)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if actual == file.xxh3_128 else f"has checksum {actual}, expected {file.xxh3_128}"


def _damaged_samples(data_set: DataSet, file: FileInfo, reason: str, moved: Callable[[], None]) -> Iterator[Problem]:
    if not isinstance(file, ShardInfo):
        yield Problem(file.name, None, reason)
        return
    if why := _why_not_opened(data_set.folder / file.name):
        samples = format_count(file.num_samples, "sample")
        yield Problem(file.name, None, f"{why}, and with it {samples}", is_lost=True)
        return
    yield Problem(file.name, None, reason)
    names = [shard.name for shard in data_set.manifest.shards]
    damaged = 0
    for sample in np.flatnonzero(data_set.index["shard"] == names.index(file.name)):
        moved()
        try:
            data_set.read(int(sample))
        except (DatapipeError, OSError) as error:
            damaged += 1
            reason = error.message if isinstance(error, DatapipeError) else str(error)
            yield Problem(file.name, data_set.key(int(sample)), reason)
    if not damaged:
        yield Problem(file.name, None, "the damage lies outside the images: all of them can be read")


def _why_not_opened(path: Path) -> str | None:
    """Say why a file cannot be opened; None if it can be."""
    try:
        os.close(open_regular(path, os.O_RDONLY))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    return None


def _decode_all(data_set: DataSet, lost: Set[str], timeout_s: float) -> Iterator[Problem]:
    groups = [range(i, min(i + GROUP, len(data_set))) for i in range(0, len(data_set), GROUP)]

    def path_of(group: range) -> Path:
        return data_set.folder / data_set.manifest.shards[int(data_set.index["shard"][group[0]])].name

    results = work_on_files(partial(_decode, data_set, lost), groups, path_of, timeout_s, _CORES)
    with closing(results), Progress(f"decoding {data_set.folder}", len(data_set)) as progress:
        for group, problems in zip(groups, results, strict=True):
            yield from problems
            progress.advance(len(group))


def _decode(data_set: DataSet, lost: Set[str], group: range, moved: Callable[[], None]) -> list[Problem]:
    problems = []
    for sample in group:
        moved()
        record = data_set.index[sample]
        if data_set.manifest.shards[record["shard"]].name in lost:
            continue
        try:
            data = data_set.read(sample)
            if data_set.raw_shape:  # any bytes are pixels
                continue
            header = check_image(data)
            actual = header.width, header.height, header.encoding
            expected = int(record["width"]), int(record["height"]), ENCODINGS[record["encoding"]]
            if actual != expected:
                raise ValueError(f"is {actual}, the index says {expected}")
        except (DatapipeError, ValueError, OSError) as error:
            shard = data_set.manifest.shards[record["shard"]].name
            reason = error.message if isinstance(error, DatapipeError) else str(error)
            problems.append(Problem(shard, data_set.key(sample), reason))
    return problems
