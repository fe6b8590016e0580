"""Archives in an archive, which are not read: how to unpack them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from shlex import quote

from ..console import format_count
from ..errors import SourceError
from ..formats.magic import folder_of
from ..formats.naming import LABELS, split_name
from ..formats.tar_listing import Member, list_members
from .file_names import ARCHIVES
from .imagenet import CLASS_TAR, TRAIN

# What unpacks "$1" into a folder of its name, by the suffix of an archive.
BY_TAR = 'mkdir "${{1%{suffix}}}" && tar -xf "$1" -C "${{1%{suffix}}}"'
BY_ZIP = 'python -m zipfile -e "$1" "${{1%{suffix}}}"'
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
UNPACKERS = dict.fromkeys(TARS, BY_TAR) | {".zip": BY_ZIP}


def refuse_nested(fd: int, path: str, members: Sequence[Member]) -> None:
    """Raise SourceError if members of a tar archive that holds no images are archives, and say how to unpack them.

    Args:
        fd: The archive's descriptor.
        path: Path of the archive.
        members: Members of the archive.
    """
    inner = [member for member in members if member.name.lower().endswith(ARCHIVES)]
    if not inner:
        return
    first = inner[0].name
    folder, above = quote(folder_of(path)), os.path.dirname(path)
    command = f"mkdir {folder} && tar -xf {quote(path)} -C {folder}"
    suffix = max((suffix for suffix in UNPACKERS if first.lower().endswith(suffix)), key=len, default="")
    if suffix and not _is_shard(fd, path, inner[0]):
        suffix = first[-len(suffix) :]
        unpack = UNPACKERS[suffix.lower()].format(suffix=suffix)
        command += f" && find {folder} -name '*{suffix}' -exec sh -c '{unpack} && rm \"$1\"' sh {{}} \\;"
    given = folder_of(path)
    if any(name.lower().endswith(TARS) and name != os.path.basename(path) for name in os.listdir(above)):
        given = above  # the others are splits, or classes
    text = f"holds {format_count(len(inner), 'archive')}, such as {first}, and no images; unpack it"
    text += f", {'' if suffix else 'and those in it, '}and give {quote(given)}: {command}"
    if all(CLASS_TAR.fullmatch(os.path.basename(member.name)) for member in inner):
        renamed = quote(os.path.join(above, TRAIN))
        text += f"; or, if it is ImageNet's, type mv {quote(path)} {renamed}, and give {quote(above)}"
    raise SourceError(text, path=path)


def _is_shard(fd: int, path: str, member: Member) -> bool:
    """Whether a member is a tar archive of samples with labels."""
    try:
        names = [inner.name for inner in list_members(fd, path, member.offset, member.offset + member.size).members]
    except SourceError:
        return False
    return any(split_name(name)[1] in LABELS for name in names)
