"""Copy data sets to a local folder: verified, resumable, the manifest last."""

from __future__ import annotations

import fcntl
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..console import Progress
from ..errors import ShardCorruptError, StagingError
from ..fsio import copy_verified, free_bytes, partial_path
from ..manifest import MANIFEST, Manifest, find_data_sets
from .plan import plan_stage

logger = logging.getLogger(__name__)

# Files copied at a time: a parallel filesystem serves several streams better than one.
STREAMS = 4


@dataclass(frozen=True)
class Staged:
    folder: Path
    num_samples: int
    copied_bytes: int
    kept_bytes: int


def stage(source: Path, local: Path) -> list[Staged]:
    """Copy the data set at `source`, or each of its splits, to `local`; one result a data set.

    A file that is there already is kept; one that an interrupted call left half-copied is continued.
    Every byte is checked against the manifest's checksums. Raises ManifestError, StagingError (no
    space, `local` inside `source`), ShardCorruptError (the source's file is damaged), OSError.
    """
    source, local = Path(source), Path(local)
    if local.resolve().is_relative_to(source.resolve()):
        raise StagingError(f"would copy {source} into itself", path=local)
    folders = find_data_sets(source)
    targets = [local if folder == source else local / folder.name for folder in folders]
    return [_stage_one(folder, target) for folder, target in zip(folders, targets, strict=True)]


def stage_once(source: Path, cache: Path) -> Path:
    """Stage one data set into a cache that all processes of a node share; return its folder there.

    The folder is named by the manifest's content, so that another version never takes its place. The
    first process copies, the others wait for it; the lock goes with its holder, even a killed one.
    """
    content = (Path(source) / MANIFEST).read_bytes() if (Path(source) / MANIFEST).exists() else b""
    folder = Path(cache) / f"{Path(source).resolve().name}-{hashlib.sha256(content).hexdigest()[:16]}"
    Path(cache).mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stage(source, folder)
    return folder


def _stage_one(source: Path, target: Path) -> Staged:
    manifest = Manifest.read(source)
    target.mkdir(parents=True, exist_ok=True)
    if (target / MANIFEST).exists() and Manifest.read(target) != manifest:
        raise StagingError(f"holds another data set than {source}; remove it or choose another folder", path=target)
    plan = plan_stage(manifest, _sizes(target, manifest, Path), _sizes(target, manifest, partial_path))
    if plan.needed_bytes > (free := free_bytes(target)):
        raise StagingError(f"needs {plan.needed_bytes:,} bytes, {free:,} are free", path=target)

    def copy(file):
        try:
            return copy_verified(source / file.name, target / file.name, file.size_bytes, file.xxh3_128)
        except ValueError as error:
            raise ShardCorruptError(str(error), path=source, shard=file.name) from error

    copied = 0
    total = sum(file.size_bytes for file in plan.copy)
    with Progress(f"staging {source}", total, "B") as progress, ThreadPoolExecutor(STREAMS) as pool:
        try:
            for file, count in zip(plan.copy, pool.map(copy, plan.copy), strict=True):
                copied += count
                progress.advance(file.size_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    manifest.write(target)
    return Staged(target, manifest.num_samples, copied, sum(file.size_bytes for file in plan.keep))


def _sizes(folder: Path, manifest: Manifest, name) -> dict[str, int]:
    found = {}
    for file in manifest.all_files():
        path = name(folder / file.name)
        if path.is_file():
            found[file.name] = path.stat().st_size
    return found
