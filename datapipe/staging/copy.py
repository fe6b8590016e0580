"""Copy data sets to a local folder: verified, resumable, with the manifest last."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from ..checks import check_seconds
from ..console import Progress
from ..dataset.manifest import MANIFEST, FileInfo, Manifest, find_data_sets, read_content
from ..errors import ManifestError, SettingError, ShardCorruptError, StagingError
from ..fsio import atomic_write, checksum, copy_verified, free_bytes, locked, make_folder, partial_path
from ..streams import TIMEOUT_S, work_on_files
from .plan import StagePlan, plan_stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged:
    """A data set's local copy."""

    folder: Path
    num_samples: int
    copied_bytes: int  # read from the source by this call
    kept_bytes: int  # of files that were there already


@dataclass(frozen=True)
class _Job:
    """A data set to be copied."""

    source: Path
    target: Path
    content: bytes  # of the manifest's file: read once, and written to the target unchanged
    manifest: Manifest


def stage(source: Path, local: Path, timeout_s: float = TIMEOUT_S) -> list[Staged]:
    """Copy the data set at `source`, or each of its splits, to `local`.

    A file that is there already is kept if it has the manifest's checksum, and copied again if not. A file that an
    interrupted call left half-copied is continued. Every byte is checked. A second process waits for the first, and
    then copies nothing. Where everything is in place, nothing is locked or written, so `local` may be read-only.

    Args:
        source: a data set, or the folder of its splits.
        local: the folder for the copy; splits become its sub-folders.
        timeout_s: how long a read or write may take, in seconds, above 0.

    Returns:
        one result per data set.

    Raises:
        SettingError: `local` lies in `source` or is a file, or `timeout_s` is out of range.
        ManifestError: there is no readable data set at `source`.
        StagingError: there is not enough space, or `local` holds another data set.
        ShardCorruptError: the source is damaged.
        DatapipeError: a read or write takes longer than `timeout_s`.
        OSError: a file cannot be read or written.
    """
    source, local = Path(source), Path(local)
    folders = {path: local if path == source else local / path.name for path in find_data_sets(source)}
    jobs = [_job(path, target, read_content(path)) for path, target in folders.items()]
    return _stage(source, local, jobs, timeout_s)


def stage_once(source: Path, cache: Path, timeout_s: float = TIMEOUT_S) -> Path:
    """Stage one data set into a cache that all processes of a node share.

    Args:
        source: the data set.
        cache: a node-local folder. The copy's folder is named after the manifest's content, so that another version
            of the data set never takes its place.
        timeout_s: how long a read or write may take, in seconds, above 0.

    Returns:
        the folder of the copy.

    Raises:
        DatapipeError, SettingError, OSError: as `stage`.
    """
    source = Path(source)
    content = read_content(source)
    folder = Path(cache) / f"{source.resolve().name}-{hashlib.sha256(content).hexdigest()[:16]}"
    _stage(source, folder, [_job(source, folder, content)], timeout_s)
    return folder


def _job(source: Path, target: Path, content: bytes) -> _Job:
    return _Job(source, target, content, Manifest.parse(content, source / MANIFEST))


def _stage(source: Path, local: Path, jobs: list[_Job], timeout_s: float) -> list[Staged]:
    check_seconds("timeout_s", timeout_s)
    if local.resolve().is_relative_to(source.resolve()):
        raise SettingError(f"LOCAL: {local} lies in {source}, which would be copied into itself; choose another")
    if local.exists() and not local.is_dir():
        raise SettingError(f"LOCAL: {local} is a file; allowed: a folder, or a new name")
    with ExitStack() as stack:
        plans = []
        for job in jobs:
            plan = _plan(job, timeout_s) if _has_manifest(job) else None
            if plan is None or plan.copy:
                make_folder(job.target)
                stack.enter_context(locked(job.target, wait=True))
                _has_manifest(job)  # raises where another data set has been put there in the meantime
                plan = _plan(job, timeout_s)
            plans.append(plan)
        needed = sum(plan.needed_bytes for plan in plans)
        if needed and needed > (free := free_bytes(local)):
            raise StagingError(f"needs {needed:,} bytes, {free:,} are free", path=local)
        return [_copy(job, plan, timeout_s) for job, plan in zip(jobs, plans, strict=True)]


def _has_manifest(job: _Job) -> bool:
    """Return whether the manifest is in place and whole. Raises StagingError where it is another data set's."""
    try:
        content = read_content(job.target)
        is_other = content != job.content and Manifest.parse(content, job.target / MANIFEST) != job.manifest
    except ManifestError:
        return False
    if is_other:
        message = f"holds another data set than {job.source}; remove it or choose another folder"
        raise StagingError(message, path=job.target)
    return content == job.content


def _plan(job: _Job, timeout_s: float) -> StagePlan:
    paths = {file.name: job.target / file.name for file in job.manifest.all_files()}
    there = [name for name, path in paths.items() if path.is_file()]
    sums = work_on_files(lambda name, moved: checksum(paths[name], moved), there, paths.__getitem__, timeout_s)
    with closing(sums):
        present = dict(zip(there, sums, strict=True))
    halves = {name: partial_path(path) for name, path in paths.items()}
    partial = {name: path.stat().st_size for name, path in halves.items() if path.is_file()}
    return plan_stage(job.manifest, present, partial)


def _copy(job: _Job, plan: StagePlan, timeout_s: float) -> Staged:
    def copy(file: FileInfo, moved: Callable[[], None]) -> int:
        source, target = job.source / file.name, job.target / file.name
        try:
            return copy_verified(source, target, file.size_bytes, file.xxh3_128, moved)
        except ValueError as error:
            raise ShardCorruptError(str(error), path=job.source, shard=file.name) from error

    copied = 0
    counts = work_on_files(copy, plan.copy, lambda file: job.source / file.name, timeout_s)
    total = sum(file.size_bytes for file in plan.copy)
    with closing(counts), Progress(f"staging {job.source}", total, "B") as progress:
        for file, count in zip(plan.copy, counts, strict=True):
            copied += count
            progress.advance(file.size_bytes)
    if not _has_manifest(job):
        path = job.target / MANIFEST
        if path.exists():
            logger.warning("%s is damaged: writing it again", path)
        with atomic_write(path) as manifest:
            manifest.write(job.content)
    return Staged(job.target, job.manifest.num_samples, copied, sum(file.size_bytes for file in plan.keep))
