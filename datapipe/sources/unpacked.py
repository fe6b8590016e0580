"""Files that are read whole, also out of archives: never more of them than is allowed.

A compressed file of a megabyte may hold gigabytes, and so may a header only claim them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator, Set
from typing import BinaryIO

from ..errors import SourceError
from .paths import opened
from .tar_listing import MAX_HEADER_BYTES

MAGIC = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
MAX_MEMBERS = 10_000  # the archives that are read so have about a hundred


def read_file(path: str, bounds: str | None, max_bytes: int) -> bytes:
    """The content of a file. Raises SourceError, also for more than `max_bytes`."""
    with opened(path, bounds) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        _check_size(path, size, max_bytes)
        data = file.read(size)  # what is added meanwhile is not of the file that was looked at
        if len(data) < size:
            raise SourceError(f"is truncated: it ends after {len(data)} of its {size} bytes", path=path)
        return data


def members(path: str, bounds: str | None, wanted: Set[str], max_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    """The names of all files in a tar archive, compressed or not, with the contents of those that `wanted` names.

    A wanted name is the end of a path in the archive. `max_bytes`: of all contents together. Raises SourceError.
    """
    with opened(path, bounds) as fd, open(fd, "rb", closefd=False) as file:
        try:
            unpack = MAGIC.get(file.peek(2)[:2])
            stream = _Stream(unpack(file) if unpack else file)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for number, member in enumerate(archive):
                    if number == MAX_MEMBERS:
                        raise tarfile.ReadError(f"it has more than {MAX_MEMBERS} members")
                    if member.size < 0:  # the next header would be an earlier one, and all is unpacked once more
                        raise tarfile.ReadError(f"it gives {member.name} a size of {member.size} bytes")
                    if not member.isreg():
                        continue
                    data = None
                    if any(f"/{member.name}".endswith(f"/{name}") for name in wanted):
                        _check_size(f"{path}: {member.name}", member.size, max_bytes)
                        max_bytes -= member.size
                        stream.max_bytes = io.DEFAULT_BUFFER_SIZE + member.size
                        data = archive.extractfile(member).read()
                        stream.max_bytes = MAX_HEADER_BYTES
                    yield member.name, data
        except DAMAGE as error:
            raise SourceError(f"is a truncated or corrupt archive, or none: {error}", path=path) from error


def _check_size(path: str, size: int, max_bytes: int) -> None:
    if not 0 <= size <= max_bytes:
        raise SourceError(f"has {size} bytes, and no such file has more than {max_bytes}", path=path)


class _Stream:
    """What tarfile reads an archive from: in pieces of at most `max_bytes`, whatever its headers claim.

    It is unpacked before tarfile sees it, which takes an I/O error in a compressed file for another format.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.max_bytes = MAX_HEADER_BYTES
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.max_bytes:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        return self._file.read(size)
