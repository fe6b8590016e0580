"""Archives that are read whole, but never more bytes than is allowed; and archives in archives, which are not read.

A compressed file of a megabyte may hold gigabytes, and a header may claim any size.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from shlex import quote
from typing import IO, cast

from ..console import format_count
from ..errors import SourceError
from ..formats.magic import HEAD_BYTES, explain, folder_of
from ..formats.naming import LABELS, split_name
from ..formats.tar_listing import END, MAX_HEADER_BYTES, Member, list_members
from .file_names import ARCHIVES, CLASS_TAR, IMAGENET_TRAIN
from .paths import open_checked

_MAGIC: dict[bytes, Callable[[io.BufferedReader], io.BufferedIOBase]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7": lzma.open,
}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_MAX_MEMBERS = 10_000  # the archives that are read here have about a hundred
_MAX_PADDING_BYTES = 16 << 20  # of zeros behind an archive's end mark; writers fill up a few KiB
# What unpacks "$1" into a folder of its name, by the suffix of an archive.
_BY_TAR = 'mkdir "${{1%{suffix}}}" && tar -xf "$1" -C "${{1%{suffix}}}"'
_BY_ZIP = 'python -m zipfile -e "$1" "${{1%{suffix}}}"'
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_UNPACKERS = dict.fromkeys(_TARS, _BY_TAR) | {".zip": _BY_ZIP}


def read_file(path: str, bounds: str | None, max_bytes: int) -> bytes:
    """Return the content of a file. Raises SourceError if it cannot be read, or is larger than such a file can be.

    Args:
        path: The file.
        bounds: See `paths`.
        max_bytes: The largest size that such a file can have.
    """
    with open_checked(path, bounds) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        _check_size(path, size, max_bytes)
        data = file.read(size)  # not what is being appended
        if len(data) < size:
            raise SourceError(f"is truncated: it ends after {len(data)} of its {size} bytes", path=path)
        return data


def members(path: str, bounds: str | None, names: Set[str], max_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    """Read the files in a tar archive, compressed or not, to its end, where its checksum stands if it is compressed.

    Args:
        path: The archive.
        bounds: See `paths`.
        names: Ends of the paths, in the archive, of the files whose contents are read.
        max_bytes: The largest size that these contents can have together.

    Yields:
        The name of each member that is not a folder, and its content or None.

    Raises:
        SourceError: The archive is damaged or cut short, holds one of `names` twice, or claims to hold more.
            What was yielded before may be damaged, too.
    """
    with open_checked(path, bounds) as fd, open(fd, "rb", closefd=False) as file:
        magic = file.peek(4)
        if magic.startswith(_ZSTANDARD):
            raise SourceError("is compressed with Zstandard, and not read: unpack it with zstd -d", path=path)
        unpack = next((unpack for start, unpack in _MAGIC.items() if magic.startswith(start)), None)
        try:
            stream = _Stream(unpack(file) if unpack else file)
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:  # it only reads, seeks and tells
                yield from _read_members(path, archive, stream, names, max_bytes)
                stream.read_end()
        except _DAMAGE as error:
            if unpack is None and (what := explain(os.pread(fd, HEAD_BYTES, 0), path)):
                raise SourceError(what, path=path) from error
            raise SourceError(f"is a truncated or corrupt archive, or none: {error}", path=path) from error


def _read_members(
    path: str, archive: tarfile.TarFile, stream: _Stream, names: Set[str], max_bytes: int
) -> Iterator[tuple[str, bytes | None]]:
    read: set[str] = set()
    for number, member in enumerate(archive):
        if number == _MAX_MEMBERS:
            raise tarfile.ReadError(f"it has more than {_MAX_MEMBERS} members")
        if member.size < 0:  # the next header would be an earlier one: an endless loop
            raise tarfile.ReadError(f"it gives {member.name} a size of {member.size} bytes")
        if member.isdir():
            continue
        data = None
        name = next((name for name in names if f"/{member.name}".endswith(f"/{name}")), None)
        if member.isreg() and name is not None:
            if name in read:
                raise SourceError(f"holds {name} twice", path=path)
            read.add(name)
            _check_size(f"{path}: {member.name}", member.size, max_bytes)
            max_bytes -= member.size
            stream.max_bytes = io.DEFAULT_BUFFER_SIZE + member.size
            content = archive.extractfile(member)
            assert content is not None  # as for all regular files
            data = content.read()
            stream.max_bytes = MAX_HEADER_BYTES
        yield member.name, data


def _check_size(path: str, size: int, max_bytes: int) -> None:
    if not 0 <= size <= max_bytes:
        raise SourceError(f"has {size} bytes, and no such file has more than {max_bytes}", path=path)


class _Stream:
    """The file that tarfile reads an archive from, in pieces of at most `max_bytes`, whatever its headers claim.

    The archive is decompressed here, because tarfile takes an I/O error in a compressed file for another format.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.max_bytes = MAX_HEADER_BYTES
        self.seek, self.tell, self._file = file.seek, file.tell, file
        self._last = b""

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.max_bytes:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        self._last = self._file.read(size)
        return self._last

    def read_end(self) -> None:
        """Read what follows the last member. Raises what stands in _DAMAGE unless it is an end mark, and zeros."""
        if self._last != END:  # tarfile takes a header that it cannot read for the end
            raise tarfile.ReadError("it ends without an end mark")
        for _ in range(_MAX_PADDING_BYTES // io.DEFAULT_BUFFER_SIZE):
            data = self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not data:
                return
            if data.strip(b"\0"):
                break
        raise tarfile.ReadError("something follows its end mark")


# --- archives in archives ---------------------------------------------------------------------------


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
    suffix = max((suffix for suffix in _UNPACKERS if first.lower().endswith(suffix)), key=len, default="")
    if suffix and not _is_shard(fd, path, inner[0]):
        suffix = first[-len(suffix) :]
        unpack = _UNPACKERS[suffix.lower()].format(suffix=suffix)
        command += f" && find {folder} -name '*{suffix}' -exec sh -c '{unpack} && rm \"$1\"' sh {{}} \\;"
    given = folder_of(path)
    if any(name.lower().endswith(_TARS) and name != os.path.basename(path) for name in os.listdir(above)):
        given = above  # the others are splits, or classes
    text = f"holds {format_count(len(inner), 'archive')}, such as {first}, and no images; unpack it"
    text += f", {'' if suffix else 'and those in it, '}and give {quote(given)}: {command}"
    if all(CLASS_TAR.fullmatch(os.path.basename(member.name)) for member in inner):
        renamed = quote(os.path.join(above, IMAGENET_TRAIN))
        text += f"; or, if it is ImageNet's, type mv {quote(path)} {renamed}, and give {quote(above)}"
    raise SourceError(text, path=path)


def _is_shard(fd: int, path: str, member: Member) -> bool:
    """Whether a member is a tar archive of samples with labels."""
    try:
        names = [inner.name for inner in list_members(fd, path, member.offset, member.offset + member.size).members]
    except SourceError:
        return False
    return any(split_name(name)[1] in LABELS for name in names)
