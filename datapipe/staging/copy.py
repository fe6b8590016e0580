"""Copy data sets to a local folder: verified, resumable, the manifest last."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..console import Progress
from ..errors import SettingError, ShardCorruptError, StagingError
from ..fsio import checksum, copy_verified, free_bytes, locked, make_folder, partial_path
from ..manifest import MANIFEST, FileInfo, Manifest, find_data_sets
from .plan import StagePlan, plan_stage

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

    What is there already is kept if it has the manifest's checksum, and copied anew if not; a file that an
    interrupted call left half-copied is continued. Every byte is checked. A second process waits for the
    first, and then finds all in place. Raises SettingError (`local` lies in `source`), ManifestError,
    StagingError (no space, `local` holds another data set), ShardCorruptError (the source is damaged), OSError.
    """
    source, local = Path(source), Path(local)
    if local.resolve().is_relative_to(source.resolve()):
        raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
    if local.exists() and not local.is_dir():
        raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")
    folders = {path: local if path == source else local / path.name for path in find_data_sets(source)}
    with ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        plans = []
        for folder, target in folders.items():
            make_folder(target)
            stack.enter_context(locked(target, wait=True))
            plans.append(_plan(folder, target, pool))
        needed, free = sum(plan.needed_bytes for plan in plans), free_bytes(local)
        if needed > free:
            raise StagingError(f"needs {needed:,} bytes, {free:,} are free", path=local)
        return [_copy(*pair, plan, pool) for pair, plan in zip(folders.items(), plans, strict=True)]


def stage_once(source: Path, cache: Path) -> Path:
    """Stage one data set into a cache that all processes of a node share; return its folder there.

    The folder is named by the manifest's content, so that another version never takes its place.
    """
    content = Manifest.read(source).model_dump_json().encode()
    folder = Path(cache) / f"{Path(source).resolve().name}-{hashlib.sha256(content).hexdigest()[:16]}"
    stage(source, folder)
    return folder


def _plan(source: Path, target: Path, pool: ThreadPoolExecutor) -> StagePlan:
    manifest = Manifest.read(source)
    if (target / MANIFEST).exists() and Manifest.read(target) != manifest:
        raise StagingError(f"holds another data set than {source}; remove it or choose another folder", path=target)
    files = list(manifest.all_files())
    there = [file.name for file in files if (target / file.name).is_file()]
    present = dict(zip(there, pool.map(lambda name: checksum(target / name), there), strict=True))
    halves = {file.name: partial_path(target / file.name) for file in files}
    return plan_stage(manifest, present, {name: path.stat().st_size for name, path in halves.items() if path.is_file()})


def _copy(source: Path, target: Path, plan: StagePlan, pool: ThreadPoolExecutor) -> Staged:
    manifest = Manifest.read(source)

    def copy(file: FileInfo) -> int:
        try:
            return copy_verified(source / file.name, target / file.name, file.size_bytes, file.xxh3_128)
        except ValueError as error:
            raise ShardCorruptError(str(error), path=source, shard=file.name) from error

    copied = 0
    with Progress(f"staging {source}", sum(file.size_bytes for file in plan.copy), "B") as progress:
        try:
            for file, count in zip(plan.copy, pool.map(copy, plan.copy), strict=True):
                copied += count
                progress.advance(file.size_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    manifest.write(target)
    return Staged(target, manifest.num_samples, copied, sum(file.size_bytes for file in plan.keep))
