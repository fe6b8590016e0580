"""The `webdataset` backend: tar shards streamed the WebDataset way, also others' shards, and the output of commands.

An epoch's shards, shuffled, are one long stream of samples, of which each rank reads an equal part, from the middle of
a shard to the middle of another. So no sample is lost, and all ranks have the same number of steps, whatever the shards
hold. For that the number of samples in each shard has to be known: from our manifest, from DALI's index beside it
(`.idx`), from a `sizes.json` (shard name to count), or by reading it once.

The order depends on the number of ranks and on the shuffle buffer; a state holds for the same number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from .. import watched
from ..dataset.manifest import MANIFEST, Manifest
from ..errors import DatapipeError, DecodeError, ManifestError, SettingError, ShardReadError, SourceError
from ..formats.naming import IMAGES, split_name
from ..formats.tar_listing import list_members
from ..split_names import TEST, TRAIN, own_splits, split_words
from ..splits import AmbiguousSplitError, SplitRule, VariantsError
from .base import DataDescription, Loader
from .cpu import make_decoding_loader
from .options import LoaderOptions
from .tar_streams import Sample, TarShard, TarStreams, end_commands, import_webdataset, locate, read_samples

logger = logging.getLogger(__name__)

_RAISED = {kind.__name__: kind for kind in (DecodeError, ManifestError, ShardReadError)}  # by ranks that count
_COUNTED = 100  # samples counted at a time: that takes less than `timeout_s`, where the whole shard may not
_MAX_SAMPLES = 1 << 32  # in a shard; so that no sum of them passes 64 bits
_LINE_CHARS = 100  # of the first line of DALI's index, which is a version and a number
_LAST_NUMBER = re.compile("[0-9]+(?=[^0-9]*$)")


def make_loader(path: Path | str, options: LoaderOptions) -> Loader:
    """Open the shards at `path`, those of a split if there are several, and make their loader."""
    options.refuse_other_than("backend: 'webdataset'", order="full", io="cached")
    shards, counts, data = describe_shards(str(path), options)
    return make_decoding_loader(data, options, TarStreams(shards, counts, options))


def describe_shards(path: str, options: LoaderOptions) -> tuple[list[TarShard], list[int], DataDescription]:
    """List the shards at a path, count their samples, and describe their images as far as that is known.

    Args:
        path: A folder, or URLs.
        options: Options of the loader, with the split if a folder has shards of several.

    Returns:
        The shards, the number of samples of each, and what is known of all.

    Raises:
        ManifestError: The shards or their samples are missing.
        SettingError: It is not clear which shards are meant, or they are not tar files.
    """
    import_webdataset()
    shards, manifest = watched.call(
        partial(_list_shards, path, options.split), options.timeout_s, path, "opening the data set"
    )
    if manifest is not None:
        counts = [shard.num_samples for shard in manifest.shards]
        size = None if manifest.width is None or manifest.height is None else (manifest.width, manifest.height)
        return shards, counts, DataDescription.from_manifest(manifest, size, _checksum(shards, counts))
    if not shards:
        raise ManifestError("holds no tar shards", path=path)
    if not sum(counts := _count_all(shards, options)):
        raise ManifestError("its tar shards hold no samples", path=path)
    return shards, counts, DataDescription(sum(counts), None, 3, None, None, None, _checksum(shards, counts))


def _list_shards(path: str, split: str | None) -> tuple[list[TarShard], Manifest | None]:
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


def _checksum(shards: list[TarShard], counts: list[int]) -> str:
    names = [(str(shard).rpartition("/")[2], count) for shard, count in zip(shards, counts, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(names).encode())


def _count_all(shards: list[TarShard], options: LoaderOptions) -> list[int]:
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
            raise _RAISED.get(kind, DatapipeError)(message, path=path, shard=shard, key=key)
        counts |= dict(its_counts)
    return [counts[i] for i in range(len(shards))]


def _count(shard: TarShard, timeout_s: float) -> int:
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
    return [sample.key for sample in islice(samples, _COUNTED)]


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


def _read_count(shard: TarShard) -> int | None:
    """Read from a file beside a shard how many samples it holds; None where there is no such file."""
    beside = Path(shard)
    try:
        sizes, index = beside.with_name("sizes.json"), beside.with_suffix(".idx")
        if os.path.exists(index):
            with index.open() as file:
                count = int(file.readline(_LINE_CHARS).split()[1])
        elif os.path.exists(sizes):
            count = int(json.loads(sizes.read_text())[beside.name])
        else:
            return None
        if 0 <= count <= _MAX_SAMPLES:
            return count
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass
    logger.warning("%s: the number of samples beside it cannot be read", shard)
    return None


def shards_of_split(folder: Path, split: str | None) -> list[str]:
    """List the tar shards of a split, or of the only one. Raises SettingError."""
    entries = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    names = [name for name in entries if name.lower().endswith(".tar")]
    for name in (name for name in entries if names and name not in names and ".tar" in name.lower()):
        logger.warning("%s: is not read: it is not named as a tar shard", folder / name)
    try:
        names_of = SplitRule().divide(names, folder) if names else {}
        if split == TEST:  # beside val it was not looked at
            SplitRule().divide(names_of.get(TEST, []), folder)
    except AmbiguousSplitError as error:
        example = "shard-{000..009}.tar"
        if isinstance(error, VariantsError):
            variants = next(iter(error.variants.values()))
            example = _in_braces(next(iter(variants.groups.values())))
        which = f"give those that you mean, such as {folder}/{example}"
        raise SettingError(f"path: {folder}: {error.why}; {which}") from error
    if [*names_of] == [TRAIN] and not any(map(split_words, names)) and len(own := own_splits(folder.absolute())) == 1:
        names_of = {own.pop(): names}
    if split is None and len(names_of) > 1:
        which = ", ".join(f"{name} (such as {of_name[0]})" for name, of_name in names_of.items())
        raise SettingError(f"path: {folder} holds shards of {which}: choose one, as split={next(iter(names_of))!r}")
    if split is not None and split not in names_of:
        raise SettingError(f"split: {split!r} is not in {folder}, which has {', '.join(names_of) or 'no tar shards'}")
    return names_of[split] if split else next(iter(names_of.values()), [])


def _in_braces(names: Sequence[str]) -> str:
    """Return a pattern as a shell expands it that names some files.

    >>> _in_braces(["a-0.tar", "a-1.tar"]), _in_braces(["a-0.tar", "a-2.tar"]), _in_braces(["a-0.tar"])
    ('a-{0..1}.tar', '{a-0.tar,a-2.tar}', 'a-0.tar')
    """
    if len(names) == 1:
        return names[0]
    numbers = [match[0] for name in names if (match := _LAST_NUMBER.search(name))]
    stems = {_LAST_NUMBER.sub("{}", name) for name in names}
    width = len(numbers[0]) if numbers else 0
    if len(stems) == 1 and numbers == [f"{int(numbers[0]) + i:0{width}}" for i in range(len(names))]:
        return stems.pop().replace("{}", f"{{{numbers[0]}..{numbers[-1]}}}")
    return f"{{{','.join(names)}}}"
