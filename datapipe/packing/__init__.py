"""Pack a raw data set into shards: plan purely, then write them in parallel, in one process or many.

The same source, seed and options give the same bytes, whatever the number of threads, tasks and nodes. Several tasks
(those of a Slurm job, say) need no communication. The plan in OUT/.pack says which shard belongs to which task, and a
small file beside it records each finished shard. The last task to end sees that all are finished, writes the manifests,
and moves the whole to its place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import watched
from ..dataset.manifest import MANIFEST, SPLITS, STATE, Manifest, find_data_sets
from ..errors import SettingError, WrongPathError
from ..fsio import checksum
from ..names import CONVERTED
from ..sources import open_source
from ..sources.packed import load as open_packed
from .job import PackJob, PackResult
from .options import SHARD_MIB, PackOptions
from .out_folder import OutFolder

__all__ = ["PackOptions", "PackResult", "convert", "finish", "finish_conversion", "pack"]


def pack(source_path: Path, out: Path, options: PackOptions) -> PackResult:
    """Pack each split of a raw data set into `out/<split>`.

    What an interrupted call has left in `out` is completed: finished shards stay. With `overwrite` an old data set
    stays until the new one is whole.

    Args:
        source_path: A folder, an archive or a CSV file (see `sources`).
        out: A folder, new or empty except for an unfinished pack, or for a data set to overwrite.
        options: Options of the images and the shards, and this process's share of the work.

    Returns:
        The manifests by split; none while other tasks have shards to write.

    Raises:
        SourceError: The source cannot be used, or too many samples are bad (a WrongPathError where there is none).
            Nothing is written for a source that cannot be listed.
        SettingError: `out` holds something else and `overwrite` is not set, or lies in the source, or another process
            packs there; or the source has changed since the unfinished pack was planned.
        DatapipeError: A read or write hangs.
        OSError: The disk is full, say.
    """
    if not (source_path.exists() or (out / STATE).exists() or options.resume or options.task.count > 1):
        raise WrongPathError("does not exist", path=source_path)
    places = source_path, *(source_path / split for split in SPLITS)  # not every class folder is looked into
    if data_set := next((place for place in places if (place / MANIFEST).exists()), None):
        raise SettingError(f"SOURCE: {data_set} is packed already; datapipe convert puts it into another format")
    if options.format == "npy" and (options.recode.store != "raw" or options.recode.compress):
        raise SettingError("format: npy holds nothing but pixels; allowed: with --store raw, not compressed")
    return _pack_job(source_path, out, options).run()


def finish(source_path: Path, out: Path, options: PackOptions) -> PackResult:
    """Write the manifests of a pack whose shards are all there.

    Args:
        source_path: The source that was packed.
        out: The folder of the unfinished pack.
        options: Options with which it was packed.

    Returns:
        The manifests by split.

    Raises:
        SettingError: `out` holds no unfinished pack, or one of another source or with other options, or tasks are
            working on it.
        DatapipeError: Shards are missing.
    """
    return _pack_job(source_path, out, options).finish()


def convert(folder: Path, out: Path, options: PackOptions) -> PackResult:
    """Put packed data sets into another format: the same images, keys, labels, order and quarantine.

    Args:
        folder: A packed data set, or the folder of its splits.
        out: Folder of the result, as for `pack`.
        options: Options as for `pack`. Seed and re-encoding remain what they were, and so does `shard_mib` when it is
            None.

    Returns:
        The manifests by split; none while other tasks have shards to write.

    Raises:
        ManifestError: `folder` does not hold a packed data set that can be read.
        SettingError, DatapipeError, OSError: The same cases as for `pack`.
    """
    return _conversion_job(folder, out, options).run()


def finish_conversion(folder: Path, out: Path, options: PackOptions) -> PackResult:
    """Write the manifests of a `convert` whose shards are all there.

    Args:
        folder: The data set that was converted.
        out: The folder of the unfinished conversion.
        options: Options with which it was converted.

    Returns:
        The manifests by split.

    Raises:
        SettingError, DatapipeError: The same cases as for `finish`.
    """
    return _conversion_job(folder, out, options).finish()


def _pack_job(source_path: Path, out: Path, options: PackOptions) -> PackJob:
    if options.shard_mib is None:
        options = replace(options, shard_mib=SHARD_MIB)
    source_settings = {
        "source": str(source_path.resolve()),
        "kind": options.kind,
        "outside": options.outside,
        "check": options.recode.check,
    }
    for name in ("split", "labels", "label_column", "path_column"):
        value = getattr(options, name)
        if value not in ((), "auto", None):  # as in plans of earlier versions
            source_settings[name] = list(value) if name == "split" else value
    if options.left_out is not None:
        place = options.left_out.resolve()
        if place.is_dir() or not place.parent.is_dir():
            problem = "is a folder" if place.is_dir() else "lies in a folder that does not exist"
            raise SettingError(f"left_out: {options.left_out} {problem}; allowed: a file")
        if inside := next((folder for folder in (out, source_path) if folder.resolve() in place.parents), None):
            raise SettingError(f"left_out: {options.left_out} lies in {inside}; choose another place")
    list_source = partial(
        open_source,
        source_path,
        options.kind,
        options.outside,
        options.split,
        options.labels,
        options.label_column,
        options.path_column,
        options.strict,
        options.left_out,
    )
    return PackJob(OutFolder(out, source_path), options, source_settings, list_source)


def _conversion_job(folder: Path, out: Path, options: PackOptions) -> PackJob:
    if options.format == "npy":
        raise SettingError(f"format: npy holds nothing but pixels; allowed: {', '.join(CONVERTED)}")
    out_folder = OutFolder(out, folder)
    if not folder.exists() and (plan := out_folder.load_plan()):  # what was read of it is in the plan
        known = {name: plan.settings.get(name) for name in ("manifests", "seed", "recode", "shard_mib")}
    else:
        known = watched.call(partial(_packed_settings, folder), options.timeout_s, folder)
    source_settings = {"source": str(folder.resolve()), **known}
    if options.shard_mib is not None:
        source_settings["shard_mib"] = options.shard_mib
    list_source = partial(watched.call, partial(open_packed, folder), options.timeout_s, folder)
    return PackJob(out_folder, options, source_settings, list_source)


def _packed_settings(folder: Path) -> dict[str, Any]:
    """Return what a conversion's plan keeps of the data sets in a folder."""
    data_sets = find_data_sets(folder)
    manifest = Manifest.read(data_sets[0])
    return {
        "manifests": {path.name: checksum(path / MANIFEST) for path in data_sets},
        "seed": manifest.seed,
        "recode": manifest.recode,
        "shard_mib": manifest.shard_mib,
    }
