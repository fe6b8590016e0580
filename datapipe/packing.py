"""Pack a raw data set: plan purely, then write the shards in parallel.

The plan depends only on the source, the seed and the options, and a shard only on its part of the plan:
the same input gives the same bytes, whatever the number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .console import Progress
from .dataset import DataSet
from .errors import DatapipeError, SettingError, SourceError
from .formats import FORMATS, shard_format
from .fsio import atomic_path, atomic_write, checksum, locked
from .image import ImageHeader, read_header
from .index import ENCODINGS, RECORD, read_keys, sample_checksum, write_index, write_keys
from .manifest import INDEX, KEYS, MANIFEST, FileInfo, Manifest, ShardInfo
from .order import PACK, permutation
from .sources import SPLITS, Samples, Source, open_source

logger = logging.getLogger(__name__)

# Tar headers hold names of 100 bytes (POSIX ustar); an extension and a counter must fit too.
MAX_KEY_BYTES = 80
COMPARED_SAMPLES = 16  # with the source, before a split that was packed earlier is kept
PROBED_SAMPLES = 256  # whose mean size stands for all when shards are planned: no stat a file
OUR_FILES = re.compile(rf"\.?(shard-\d{{6}}\.\w+|{MANIFEST}|{INDEX}|{KEYS})(\.partial)?")
EXTENSIONS = {"jpeg": "jpg", "png": "png"}


@dataclass(frozen=True)
class PackOptions:
    """`shard_mib`: aimed size of a shard in MiB; `workers`: processes, or None for one a core."""

    format: str = "tar"
    kind: str = "auto"
    shard_mib: int = 256
    workers: int | None = None
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise SettingError(f"format: {self.format!r} is not one of {', '.join(FORMATS)}")
        for name, low in (("shard_mib", 1), ("workers", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise SettingError(f"{name}: {value} is out of range; allowed: {low} and more")


# --- the plan ---------------------------------------------------------------------------------------


def make_keys(names: Iterable[str]) -> list[str]:
    """Unique keys that WebDataset, tar and LMDB take as they are, from the samples' paths in the source.

    WebDataset cuts a name at the first dot of its last part. So of each path only ASCII letters,
    digits, `_` and `-` stay; accents are dropped, all else becomes `_`. A key that an earlier sample has
    gets a counter: `-2`, `-3`, … Paths too long for a tar header keep their end.
    """
    taken: set[str] = set()
    counters: dict[str, int] = {}
    keys = []
    for name in names:
        base = key = _safe(name)
        while key in taken:
            counters[base] = counters.get(base, 1) + 1
            key = f"{base}-{counters[base]}"
        taken.add(key)
        keys.append(key)
    return keys


def _safe(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", name):
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "replace").decode()
        ascii_name = "".join(c for c, plain in zip(unicodedata.normalize("NFKD", name), ascii_name, strict=True)
                             if not unicodedata.combining(c) or plain != "?")  # fmt: skip
        parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) or "_" for part in ascii_name.split("/")]
        name = "/".join(parts)
    return name[-MAX_KEY_BYTES:].lstrip("/")


def plan_shards(num_samples: int, mean_bytes: float, shard_bytes: int, seed: int) -> list[np.ndarray]:
    """The samples of each shard (int64 arrays): shuffled once, then cut into shards of equal counts."""
    num_shards = min(num_samples, max(1, round(num_samples * mean_bytes / shard_bytes)))
    return np.array_split(permutation(num_samples, seed, 0, PACK), num_shards)


def mean_bytes(samples: Samples, seed: int) -> float:
    """Mean size in bytes of a few encoded images, chosen by the seed."""
    probed = permutation(len(samples), seed, 1, PACK)[:PROBED_SAMPLES]
    return float(np.mean([samples.size_bytes(int(i)) for i in probed]))


# --- one shard --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardTask:
    folder: Path
    number: int
    format: str
    keys: list[str]
    samples: Samples


@dataclass(frozen=True)
class PackedShard:
    info: ShardInfo
    sidecars: list[FileInfo]
    records: np.ndarray  # RECORD[num_samples]
    channels: int


def write_shard(task: ShardTask) -> PackedShard:
    """Write one shard under a temporary name, sync and rename it. Raises SourceError for a bad image."""
    shard = shard_format(task.format)
    path = task.folder / f"shard-{task.number:06d}{shard.SUFFIX}"
    records = np.zeros(len(task.samples), RECORD)
    records["shard"], records["label"] = task.number, task.samples.labels
    channels = 1
    with atomic_path(path) as partial:
        with contextlib.closing(shard.Writer(partial)) as writer:
            for i, key in enumerate(task.keys):
                _stop_if_told()
                data, header = _read_sample(task.samples, i)
                writer.add(key, EXTENSIONS[header.encoding], data, int(task.samples.labels[i]))
                records[i : i + 1] = _record(records[i], data, header)
                channels = max(channels, header.channels)
            finished = writer.finish()
        records["offset"] = finished.offsets
        info = ShardInfo(
            name=path.name,
            num_samples=len(records),
            size_bytes=partial.stat().st_size,
            xxh3_128=checksum(partial),
        )
    sidecars = []
    for suffix, content in finished.sidecars.items():
        with atomic_write(path.with_suffix(suffix)) as file:
            file.write(content)
        sidecars.append(_file_info(path.with_suffix(suffix)))
    return PackedShard(info, sidecars, records, channels)


def _read_sample(samples: Samples, i: int) -> tuple[bytes, ImageHeader]:
    try:
        data = samples.read(i)
        return data, read_header(data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(f"cannot be packed: {reason}", path=samples.where(i)) from error


def _record(record: np.void, data: bytes, header: ImageHeader) -> np.void:
    record["size"], record["checksum"] = len(data), sample_checksum(data)
    record["width"], record["height"] = header.width, header.height
    record["restart_interval"], record["encoding"] = header.restart_interval, ENCODINGS.index(header.encoding)
    return record


def _file_info(path: Path) -> FileInfo:
    return FileInfo(name=path.name, size_bytes=path.stat().st_size, xxh3_128=checksum(path))


# --- the whole --------------------------------------------------------------------------------------


def pack(source_path: Path, out: Path, options: PackOptions) -> dict[str, Manifest]:
    """Pack each split of a raw data set into `out/<split>`; return the manifests by split.

    Raises SourceError (unusable source; nothing is written for a source that cannot be listed),
    SettingError (`out` holds something else and `overwrite` is not set, lies in the source, or another
    process packs there), OSError. What an interrupted call left in `out` is completed: splits that are
    whole are kept if they were packed the same way, the others are packed again.
    """
    _check_place(out, source_path)
    source = open_source(source_path, options.kind)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, wait=False):
            whole = _prepare(out, source, options)
            for split in source.splits:
                if split not in whole:
                    _pack_split(source, split, out / split, options)
            return {split: Manifest.read(out / split) for split in source.splits}
    except BlockingIOError as error:
        raise SettingError(f"OUT: another process is packing into {out}; choose another, or wait for it") from error


def _check_place(out: Path, source_path: Path) -> None:
    place = out.resolve()
    if place.is_relative_to(source_path.resolve()):
        raise SettingError(f"OUT: {out} lies in SOURCE, which the next run would take for images; choose another")
    for folder in (place, *place.parents):
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"OUT: {folder} is a file; allowed: a folder, or a new name")
        if (folder / MANIFEST).exists():
            raise SettingError(f"OUT: {out} lies inside a packed data set, {folder}; choose another")


def _prepare(out: Path, source: Source, options: PackOptions) -> set[str]:
    """Make room in `out`; return the splits that are whole and stay. Refuses before it removes anything."""
    folders = {name: out / name for name in {*SPLITS.values(), *source.splits}}
    whole = {name for name, folder in folders.items() if (folder / MANIFEST).exists()}
    foreign = next(_foreign_files(out, folders.values()), None)
    if foreign:
        raise SettingError(f"OUT: {out} holds what is no packed data set, such as {foreign.name}; choose another")
    if options.overwrite:
        whole = set()
    elif whole >= set(source.splits):
        raise SettingError(f"OUT: {out} holds a packed data set already; --overwrite replaces it")
    for split in whole:
        if split not in source.splits or not _packed_like(source, split, folders[split], options):
            raise SettingError(f"OUT: {folders[split]} was packed in another way; --overwrite replaces it")
        logger.info("%s is complete and kept", folders[split])
    for split in folders.keys() - whole:
        if split in source.splits:
            folders[split].mkdir(exist_ok=True)
        (folders[split] / MANIFEST).unlink(missing_ok=True)  # first: from here on it is no data set
        for path in folders[split].iterdir() if folders[split].exists() else ():
            path.unlink()
        if split not in source.splits and folders[split].exists():
            folders[split].rmdir()
    return whole


def _foreign_files(out: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """What in `out` is neither a split's folder nor one of our files in it."""
    folders = set(folders)
    yield from (path for path in out.iterdir() if path not in folders)
    for folder in folders:
        if folder.exists():
            yield from (path for path in folder.iterdir() if not OUR_FILES.fullmatch(path.name))


def _packed_like(source: Source, split: str, folder: Path, options: PackOptions) -> bool:
    """Is this what packing the split would give? All keys and labels, and the bytes of a few images."""
    samples = source.splits[split]
    with DataSet(folder) as data_set:
        found = data_set.manifest
        wanted = (options.format, source.kind, options.seed, options.shard_mib, source.classes, len(samples))
        if wanted != (found.format, found.kind, found.seed, found.shard_mib, found.classes, found.num_samples):
            return False
        keys, order = make_keys(samples.names), permutation(len(samples), options.seed, 0, PACK)
        if read_keys(folder) != [keys[i] for i in order] or (data_set.index["label"] != samples.labels[order]).any():
            return False
        few = np.linspace(0, len(samples) - 1, COMPARED_SAMPLES, dtype=int)
        return all(data_set.read(int(i)) == samples.read(int(order[i])) for i in few)


def _pack_split(source: Source, split: str, folder: Path, options: PackOptions) -> None:
    samples = source.splits[split]
    size = mean_bytes(samples, options.seed) + shard_format(options.format).OVERHEAD_BYTES
    shards = plan_shards(len(samples), size, options.shard_mib << 20, options.seed)
    keys = make_keys(samples.names)
    tasks = (
        ShardTask(folder, number, options.format, [keys[i] for i in which], samples.select(which))
        for number, which in enumerate(shards)
    )
    packed: list[PackedShard] = []
    with Progress(f"packing {split}", len(samples)) as progress:
        for shard in _run(tasks, min(options.workers or os.cpu_count() or 1, len(shards))):
            packed.append(shard)
            progress.advance(len(shard.records))
    packed.sort(key=lambda shard: shard.info.name)
    records = np.concatenate([shard.records for shard in packed])
    write_index(folder, records)
    write_keys(folder, [keys[i] for which in shards for i in which])
    manifest = Manifest(
        format=options.format,
        kind=source.kind,
        split=split,
        num_samples=len(records),
        classes=source.classes,
        channels=3 if any(shard.channels == 3 for shard in packed) else 1,
        width=_common(records["width"]),
        height=_common(records["height"]),
        seed=options.seed,
        shard_mib=options.shard_mib,
        shards=[shard.info for shard in packed],
        files=[sidecar for shard in packed for sidecar in shard.sidecars]
        + [_file_info(folder / name) for name in (INDEX, KEYS)],
    )
    manifest.write(folder)


def _common(sizes: np.ndarray) -> int | None:
    return int(sizes[0]) if (sizes == sizes[0]).all() else None


# --- worker processes -------------------------------------------------------------------------------

_told_to_stop = None  # in a worker: a flag shared with its parent


def _run(tasks: Iterable[ShardTask], workers: int) -> Iterator[PackedShard]:
    """Write the shards, in any order. On the way out by an exception the workers stop at their next sample."""
    if workers == 1:
        yield from map(write_shard, tasks)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks, held or not
    stop = context.Value("b", 0, lock=False)
    tasks = iter(tasks)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(stop,)) as pool:
        try:
            pending = set()
            while True:
                # One task beyond the workers waits, so that none idles and few are held in memory.
                while len(pending) <= workers and (task := next(tasks, None)) is not None:
                    with _signals_held():  # a new worker inherits this: it leaves signals to us from its start
                        pending.add(pool.submit(write_shard, task))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            message = "a worker was killed; if memory was short, take fewer --workers or a smaller --shard-mib"
            raise DatapipeError(message) from error
        except BaseException:
            stop.value = 1
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(stop) -> None:
    """Stop by the parent's flag, which signals go to; and when the parent is gone."""
    global _told_to_stop
    _told_to_stop = stop
    threading.Thread(target=_follow_parent, args=(stop,), daemon=True).start()


def _follow_parent(stop) -> None:
    multiprocessing.parent_process().join()
    stop.value = 1
    time.sleep(1)  # for the shard at hand to be cleaned up
    os._exit(1)


def _stop_if_told() -> None:
    if _told_to_stop is not None and _told_to_stop.value:
        raise KeyboardInterrupt
