"""What to do with what lies in a folder that a copy is to be in, or that stands in its way: tables, pure."""

from __future__ import annotations

import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..console import format_count
from ..dataset.manifest import MANIFEST
from ..foreign import user_name
from .folder_content import ORIGIN, FolderContent
from .local_copy import LocalCopy
from .options import StageOptions

ELSEWHERE = "choose another folder"


@dataclass(frozen=True)
class Keep:
    """The copy is in place."""


@dataclass(frozen=True)
class Complete:
    """Files of the copy are missing or damaged, and no other data set is in place."""


@dataclass(frozen=True)
class Replace:
    """Another data set, or another version, is in place, and makes way.

    Attributes:
        names: Names of files that the copy does not have.
    """

    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Refuse:
    """Nothing can be done here.

    Attributes:
        why: Description of what is wrong, and what to do.
        path: File or folder that it is about.
    """

    why: str
    path: Path


Decision = Keep | Complete | Replace | Refuse


def decide(
    content: FolderContent,
    copy: LocalCopy,
    options: StageOptions,
    good: Collection[str] | None = None,
    is_part: bool = False,
) -> Decision:
    """Decide what is to be done, so that a folder becomes a copy. Return that.

    Args:
        content: Content of the folder.
        copy: Copy that it is to become.
        options: Settings of staging.
        good: Names of the files that are in place with their checksums; None if they are not compared yet. Then what
            has the right name counts.
        is_part: Whether the folder is to have slots for a part of the data set.
    """
    folder = content.folder
    there = [name for name in copy.names if name in content.entries]
    for name in there:
        if stat.S_ISDIR(content.entries[name].st_mode):
            return Refuse(f"is a folder; remove it, or {ELSEWHERE}", folder / name)
    if is_part:
        large = {MANIFEST, *(shard.name for shard in copy.manifest.shards)}
        if there and (large.intersection(there) or content.source != str(copy.resolved)):
            return Refuse(f"holds files of a copy, such as {there[0]}; {ELSEWHERE}", folder)
    if is_other(content, copy):
        return _decide_other(content, copy, options)
    if content.origin and content.origin.capacity_bytes and options.mode != "slice" and not options.replace:
        message = "has room for a part of a data set: give --mode slice, or --replace to copy all of it"
        return Refuse(message, folder)
    if content.content == copy.content and (good is None or len(good) == copy.num_files):
        return Keep()
    if good is None:
        return Complete()
    missing = [name for name in copy.names if name != MANIFEST and name not in good]
    if missing and content.info and not content.is_writable:
        message = f"is user {user_name(content.owner)}'s, which this user cannot write to"
        example = f"{format_count(len(missing), 'file is', 'files are')} missing or damaged there, such as {missing[0]}"
        return Refuse(f"{message}, and {example}; {ELSEWHERE}", folder)
    if is_handmade(content, copy) and not options.replace:
        for name in there:
            if not (content.content == copy.content if name == MANIFEST else name in good):
                message = f"is not the data set's, and not staging's; {ELSEWHERE}, or replace it with --replace"
                return Refuse(message, folder / name)
    return Complete()


def is_other(content: FolderContent, copy: LocalCopy) -> bool:
    """Return whether another data set is in place or was begun, or another version of the same."""
    is_there = content.content not in (b"", copy.content) and content.manifest != copy.manifest
    is_begun = content.origin is not None and content.origin.manifest not in ("", copy.digest)
    return is_there or is_begun


def is_earlier(content: FolderContent, source: Path, identity: str) -> bool:
    """Return whether what lies there is another version of a data set.

    The path alone does not tell: containers mount all data sets at the same one.

    Args:
        content: Content of the folder.
        source: Folder of the data set, without links.
        identity: Identity that all versions of the data set share, see `compute_identity`.
    """
    return content.source == str(source) and content.identity == identity


def is_handmade(content: FolderContent, copy: LocalCopy) -> bool:
    """Return whether somebody, and not staging, has put files of the data set there.

    Such a folder gets no `.origin.json`, so that it is never removed to make room.
    """
    return ORIGIN not in content.entries and any(name in content.entries for name in copy.names)


def _decide_other(content: FolderContent, copy: LocalCopy, options: StageOptions) -> Decision:
    message = f"holds another data set than {copy.source}"
    if not is_earlier(content, copy.resolved, copy.identity):
        if ORIGIN not in content.entries:
            return Refuse(f"{message}, which staging has not put there; {ELSEWHERE}", content.folder)
        if not options.replace:
            return Refuse(f"{message}; {ELSEWHERE}, or replace it with --replace", content.folder)
    if why := protection(content, options.placement.job):
        return Refuse(f"{message}, and {why}", content.folder)
    return Replace(frozenset(content.names - {*copy.names}))


def decide_beside(content: FolderContent, local: Path, is_inside: bool, options: StageOptions) -> Decision:
    """Decide what becomes of a folder that readers of a copy would take for a part of it.

    Args:
        content: Content of the folder, which is that of the copies, above it, or beside a copy in it.
        local: Folder of the copies.
        is_inside: Whether the folder lies in `local`, or is the same.
        options: Settings of staging.

    Returns:
        `Keep` for what is not in the way: no data set, or a copy of `cache=`, which has a digest in its name.
    """
    if not (content.is_copy or content.content) or (content.is_copy and content.has_name_of_cache()):
        return Keep()
    if not (content.is_copy and is_inside):
        return Refuse(f"is a data set: {local} cannot be a copy as well; {ELSEWHERE}", content.folder)
    if not options.replace:
        message = f"is a copy of {content.source}, which is not to be in {local}"
        return Refuse(f"{message}; {ELSEWHERE}, or remove it with --replace", content.folder)
    if why := protection(content, options.placement.job):
        return Refuse(f"is in the way, and {why}", content.folder)
    return Replace(frozenset(content.names))


def protection(content: FolderContent, job: str = "") -> str:
    """Say why a copy may not be replaced, and what to do; "" if it may.

    Args:
        content: Content of the folder of the copy.
        job: Number of this process's job, which may replace what is kept for it.
    """
    if content.is_pinned:
        return f"is pinned: unpin it, or {ELSEWHERE}"
    for lease in content.leases:
        if lease.job != job:
            until = time.strftime("%Y-%m-%d %H:%M", time.localtime(lease.until))
            return f"is kept for job {lease.job} until {until}: {ELSEWHERE}, or remove {lease.path}"
    return ""
