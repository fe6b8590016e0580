"""Tar shards as streams of samples, through the webdataset library, and how many each of them holds.

A shard is a file (a Path) or a URL (a str). Only what users themselves give is ever a URL, which the library opens and
may run as a command: what a folder or a manifest names is a file, whatever it is called.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

import torch
import xxhash

from .. import watched
from ..dataset.manifest import MANIFEST, Manifest
from ..errors import (
    DatapipeError,
    DecodeError,
    ManifestError,
    MissingBackendError,
    SettingError,
    ShardReadError,
    SourceError,
)
from ..formats.naming import IMAGES, LABELS, read_label, split_name
from ..formats.tar_listing import list_members
from .base import DataDescription, Place
from .options import LoaderOptions
from .tar_splits import shards_of_split

RAISED = {kind.__name__: kind for kind in (DecodeError, ManifestError, ShardReadError)}  # by ranks that count
logger = logging.getLogger(__name__)

COUNTED = 100  # samples counted at a time: that takes less than `timeout_s`, where the whole shard may not
MAX_SAMPLES = 1 << 32  # in a shard; so that no sum of them passes 64 bits
LINE_CHARS = 100  # of the first line of DALI's index, which is a version and a number
NUMBER = re.compile(r"\d{1,18}")  # fits into 64 bits

Shard = Path | str


class Sample(NamedTuple):
    """A sample of a stream, or why there is none."""

    number: int  # in the stream of shards as they are named: unique
    shard: Shard
    key: str
    label: int
    data: bytes
    error: DatapipeError | None = None  # why it has no image, or no label


def read_samples(shard: Shard, streams: list[BinaryIO]) -> Generator[Sample]:
    """Read a shard's samples, through the webdataset library. What is being read is one of the `streams` meanwhile.

    Raises ShardReadError.
    """
    tar = _import_webdataset().tariterators
    stream, after = None, ""
    try:
        stream = shard.open("rb") if isinstance(shard, Path) else tar.gopen.gopen(shard)
        streams.append(stream)
        members = tar.tar_file_expander([{"url": str(shard), "stream": stream}], handler=tar.reraise_exception)
        for parts in tar.group_by_keys(members, handler=tar.reraise_exception):
            after = f" after key {parts['__key__']}"
            try:
                sample = _read_sample(shard, parts)
            except DatapipeError as error:
                sample = Sample(-1, shard, parts["__key__"], 0, b"", error)
            yield sample
    except Exception as error:  # of tarfile, of the command, of the filesystem
        raise ShardReadError(f"cannot be read{after}: {error}", **locate(shard)) from error
    finally:
        if stream is not None:
            with suppress(Exception):  # a command that has more to say fails here
                stream.close()
            streams.remove(stream)


def _read_sample(shard: Shard, parts: dict) -> Sample:
    key = parts["__key__"]
    place: Place = {**locate(shard), "key": key}
    image = next((parts[name] for name in IMAGES if name in parts), None)
    if image is None:
        names = ", ".join(name for name in parts if not name.startswith("__"))
        raise DecodeError(f"has no image ({', '.join(IMAGES)}), but {names}", **place)
    label = read_label(str(shard), key, {name: parts[name] for name in LABELS if name in parts})
    if not NUMBER.fullmatch(label):
        message = f"its label is not the number of a class, {label!r}: `datapipe pack` numbers names"
        raise DecodeError(message, **place)
    return Sample(-1, shard, key, int(label), image)


def locate(shard: Shard) -> Place:
    """Say where an error of the shard is."""
    return {"path": shard.parent, "shard": shard.name} if isinstance(shard, Path) else {"path": shard}


def end_commands(streams: Iterable[BinaryIO]) -> None:
    """End the commands behind URLs: one that hangs would outlive this process, and keep its standard error open."""
    for stream in list(streams):
        command = getattr(stream, "proc", None)
        if command is not None and command.poll() is None:
            for process in _descendants(command.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)


def _descendants(process: int) -> list[int]:
    """List a process, and all that it and its children began: what a shell runs does not end with the shell."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not list them
        children = []
    return [process, *(each for child in children for each in _descendants(int(child)))]


def describe(path: str, split: str | None, options: LoaderOptions) -> tuple[list[Shard], list[int], DataDescription]:
    """List the shards at a path, count their samples, and describe their images as far as that is known.

    Args:
        path: A folder, or URLs.
        split: Split of the shards to take, if a folder has those of several splits.
        options: Options of the loader.

    Returns:
        The shards, the number of samples of each, and what is known of all.

    Raises:
        ManifestError: The shards or their samples are missing.
        SettingError: It is not clear which shards are meant, or they are not tar files.
    """
    _import_webdataset()
    shards, manifest = watched.call(partial(_list_shards, path, split), options.timeout_s, path, "opening the data set")
    if manifest is not None:
        counts = [shard.num_samples for shard in manifest.shards]
        width, height = manifest.width, manifest.height
        smallest = None if width is None or height is None else (width, height)
        checksum, classes = _checksum(shards, counts), tuple(manifest.classes)
        return (
            shards,
            counts,
            DataDescription(
                sum(counts), manifest.num_classes, manifest.channels, width, height, smallest, checksum, classes
            ),
        )
    if not shards:
        raise ManifestError("holds no tar shards", path=path)
    if not sum(counts := _count_all(shards, options)):
        raise ManifestError("its tar shards hold no samples", path=path)
    return shards, counts, DataDescription(sum(counts), None, 3, None, None, None, _checksum(shards, counts))


def _list_shards(path: str, split: str | None) -> tuple[list[Shard], Manifest | None]:
    if not os.path.isdir(path):  # a Path would raise where a command is longer than a name may be
        if split is not None:
            raise SettingError(f"split: {split!r} has no meaning for what is not a folder; leave it out")
        import braceexpand

        return [url for part in path.split("::") if part for url in braceexpand.braceexpand(part)], None
    folder = Path(path)
    if not (folder / MANIFEST).exists():
        return [folder / name for name in shards_of_split(folder, split)], None
    manifest = Manifest.read(folder)
    if split not in (None, manifest.split):
        raise SettingError(f"split: {split!r} is not in {folder}, which holds split {manifest.split}")
    stored = "raw pixels" if manifest.recode.get("store") == "raw" else f"{manifest.format} shards"
    if stored != "tar shards":
        raise SettingError(f"backend: 'webdataset' reads image files in tar shards, and {folder} holds {stored}")
    return [folder / shard.name for shard in manifest.shards], manifest


def _checksum(shards: list[Shard], counts: list[int]) -> str:
    names = [(str(shard).rpartition("/")[2], count) for shard, count in zip(shards, counts, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(names).encode())


def _count_all(shards: list[Shard], options: LoaderOptions) -> list[int]:
    """Count the samples in each shard. Ranks that can talk to each other share the work."""
    shared = options.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not shared:
        return [_count(shard, options.timeout_s) for shard in shards]
    counts: dict[int, int] = {}
    failure = None
    try:
        mine = range(options.rank, len(shards), options.world_size)
        counts = {i: _count(shards[i], options.timeout_s) for i in mine}
    except DatapipeError as error:  # all ranks take part in what follows, or those that do would wait forever
        failure = [type(error).__name__, error.message, error.path and str(error.path), error.shard, error.key]
    from ..jobgroup.store import gather_bytes

    for its in gather_bytes(json.dumps([[*counts.items()], failure]).encode()):
        its_counts, failure = json.loads(its)
        if failure is not None:
            kind, message, path, shard, key = failure
            raise RAISED.get(kind, DatapipeError)(message, path=path, shard=shard, key=key)
        counts |= dict(its_counts)
    return [counts[i] for i in range(len(shards))]


def _count(shard: Shard, timeout_s: float) -> int:
    known = watched.call(partial(_read_count, shard), timeout_s, shard, "counting its samples")
    if known is not None:
        return known
    logger.info("counting the samples of %s, once", shard)
    streams: list[BinaryIO] = []
    samples, count, keys = read_samples(shard, streams), 0, set[str]()
    try:
        while more := watched.call(partial(_some_keys, samples), timeout_s, shard, "counting its samples"):
            count += len(more)
            keys.update(more)
    except BaseException:
        end_commands(streams)
        raise
    if isinstance(shard, Path):
        skipped = watched.call(partial(_keys_beside, shard, keys), timeout_s, shard, "listing its members")
        if skipped:
            logger.warning(
                "%s: %s of its samples are not read, such as %s: they lie behind an end mark, or are links, which the "
                "webdataset library skips; `datapipe pack` reads them",
                shard, f"{len(skipped):,}", skipped[0],
            )  # fmt: skip
    return count


def _some_keys(samples: Iterator[Sample]) -> list[str]:
    return [sample.key for sample in islice(samples, COUNTED)]


def _keys_beside(shard: Path, keys: set[str]) -> list[str]:
    """List the keys of samples that a shard holds, except those that were read of it."""
    try:
        with shard.open("rb") as file:
            archive = list_members(file.fileno(), str(shard))
    except (OSError, SourceError) as error:  # of what follows an end mark, since what precedes it was read
        raise ShardReadError(f"cannot be listed: {error}", **locate(shard)) from error
    named = (split_name(member.name) for member in archive.members)
    known = {key.removeprefix("./") for key in keys}
    return list(dict.fromkeys(key for key, extension in named if extension in IMAGES and key not in known))


def _read_count(shard: Shard) -> int | None:
    """Read from a file beside a shard how many samples it holds; None where there is no such file."""
    beside = Path(shard)
    try:
        sizes, index = beside.with_name("sizes.json"), beside.with_suffix(".idx")
        if os.path.exists(index):
            with index.open() as file:
                count = int(file.readline(LINE_CHARS).split()[1])
        elif os.path.exists(sizes):
            count = int(json.loads(sizes.read_text())[beside.name])
        else:
            return None
        if 0 <= count <= MAX_SAMPLES:
            return count
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass
    logger.warning("%s: the number of samples beside it cannot be read", shard)
    return None


def _import_webdataset() -> ModuleType:
    try:
        import webdataset

        return webdataset
    except ImportError as error:
        raise MissingBackendError.for_extra("webdataset is not installed", "webdataset") from error
