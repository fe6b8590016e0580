"""List where the files in a tar archive lie, from its headers alone: one small read for each.

A plain header (POSIX ustar, GNU, old V7; pax headers that give only times and owners) is read here. An archive with
anything else (long names, sparse files) is left to Python's tarfile, which knows it all and is slower. The
format: POSIX.1-2001 pax, https://www.gnu.org/software/tar/manual/html_node/Standard.html.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..console import format_count
from ..errors import SourceError

logger = logging.getLogger(__name__)

BLOCK = tarfile.BLOCKSIZE
END = bytes(BLOCK)
# Read at a time: a page costs what a header costs, and holds the next headers where files are small (labels).
WINDOW = 4096
FILE, FOLDER, PAX = (b"0", b"\0", b"7"), b"5", b"x"
WITHOUT_BYTES = (b"1", b"2", b"3", b"4", b"6")  # links, devices, pipes
HARMLESS = re.compile(rb"([0-9]+ (mtime|atime|ctime|uid|gid|uname|gname|comment)=[^\n]*\n)+\0*")
MAX_CONTENT_BYTES = 1 << 20  # of a label
MAX_HEADER_BYTES = 1 << 20  # of a long name, or what pax adds to one


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    offset: int  # of its bytes in the file
    size: int
    content: bytes | None  # if it was asked for


class TarListing(NamedTuple):
    """What an archive holds."""

    members: list[Member]  # regular files
    num_others: int  # links, devices, pipes, sparse files


class _Unusual(Exception):
    """The archive has to be left to tarfile."""


def _nothing(name: str) -> bool:
    return False


def list_members(
    fd: int, path: str, begin: int = 0, end: int | None = None, keep_content: Callable[[str], bool] = _nothing
) -> TarListing:
    """List an archive that is, or lies in, a file.

    Names are as they stand there: they may hold `..`, so they must not be opened as paths.

    Args:
        fd: The file's descriptor.
        path: The file, for messages.
        begin: Where the archive begins in the file, in bytes.
        end: Where it ends; None: where the file ends.
        keep_content: Says by its name whether a member's content is returned, if it is small.

    Returns:
        The members, and how many others there are.

    Raises:
        SourceError: It is not an archive, or is truncated.
        OSError: The file cannot be read.
    """
    window = _Window(fd, begin, os.fstat(fd).st_size if end is None else end)
    try:
        try:
            return _list_plain(window, keep_content)
        except _Unusual:
            return _list_slowly(window, keep_content)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise SourceError(f"is a corrupt or truncated tar archive, or none: {error}", path=path) from error


class _Window(io.RawIOBase):
    """A range of a file: read at any place, or as a file of its own (for tarfile)."""

    def __init__(self, fd: int, begin: int, end: int) -> None:
        self.fd, self.begin, self.end = fd, begin, end
        self._data, self._start, self._position = b"", begin, 0

    def at(self, position: int, size: int) -> bytes:
        """Read `size` bytes, fewer at the end. Raises ReadError if the file has become shorter since it was opened."""
        offset = position - self._start
        if offset < 0 or offset + size > len(self._data):
            count = max(0, min(max(size, WINDOW), self.end - position))
            data = os.pread(self.fd, count, position)
            while len(data) < count:  # a read may return less than there is, for example before an error
                more = os.pread(self.fd, count - len(data), position + len(data))
                if not more:
                    raise tarfile.ReadError(f"it ends after {position + len(data)} bytes, and had {self.end}")
                data += more
            self._data, self._start, offset = data, position, 0
        return self._data[offset : offset + size]

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        data = self.at(self.begin + self._position, size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position


def _list_plain(window: _Window, keep_content: Callable[[str], bool]) -> TarListing:
    members: list[Member] = []
    num_others = 0
    position = window.begin
    while (header := window.at(position, BLOCK)) != END:
        name, kind, size = _parse(header, position)
        position += BLOCK
        if kind in WITHOUT_BYTES:
            num_others += 1
            continue
        if position + size > window.end:
            raise tarfile.ReadError(f"it ends within {name}")
        if kind == PAX:
            if size > WINDOW or not HARMLESS.fullmatch(window.at(position, size)):
                raise _Unusual
        elif kind in FILE and not name.endswith("/"):
            members.append(Member(name, position, size, _content(window, name, position, size, keep_content)))
        elif kind not in (*FILE, FOLDER):
            raise _Unusual
        position += -(-size // BLOCK) * BLOCK
    return TarListing(members, num_others)


def _content(window: _Window, name: str, offset: int, size: int, keep_content: Callable[[str], bool]) -> bytes | None:
    return window.at(offset, size) if size <= MAX_CONTENT_BYTES and keep_content(name) else None


def _parse(header: bytes, position: int) -> tuple[str, bytes, int]:
    """Return name, type and size of a member. Raises TarError, or _Unusual."""
    if len(header) < BLOCK:
        raise tarfile.ReadError(f"it ends without an end mark, after {position + len(header)} bytes")
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
        if header[124] & 0x80:  # a size over 8 GiB, in GNU's binary notation
            raise _Unusual
        size = int(header[124:136].strip(b" \0") or b"0", 8)
    except ValueError:
        expected = size = -1
    # The checksum is the sum of all bytes, where those of the checksum itself count as blanks. The lower half of
    # Adler-32 is 1 + the sum modulo a prime, and takes a twentieth of the time of sum().
    total = expected + sum(header[148:156]) - 8 * ord(" ")
    if size < 0 or (1 + total) % 65521 != zlib.adler32(header) & 0xFFFF:
        raise tarfile.ReadError(f"no header at byte {position}")
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:  # GNU archives have other fields there
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape"), header[156:157], size


def _list_slowly(window: _Window, keep_content: Callable[[str], bool]) -> TarListing:
    members: list[Member] = []
    num_others = 0
    window.seek(0)
    with tarfile.open(fileobj=window, mode="r:") as archive:
        for info in archive:
            if info.size < 0:  # the next header would be an earlier one: an endless loop
                raise tarfile.ReadError(f"it gives {info.name} a size of {info.size} bytes")
            if info.isreg() and not info.issparse():
                offset = window.begin + info.offset_data
                if not 0 <= info.size <= window.end - offset:
                    raise tarfile.ReadError(f"it ends within {info.name}")
                content = _content(window, info.name, offset, info.size, keep_content)
                members.append(Member(info.name, offset, info.size, content))
            else:
                num_others += not info.isdir()
        # tarfile takes a header that it cannot read for the end.
        if window.at(window.begin + archive.offset, BLOCK) != END:
            raise tarfile.ReadError(f"it ends without an end mark, after {window.begin + archive.offset} bytes")
    return TarListing(members, num_others)


def warn_of_others(path: Path | str, num_others: int, num_left_out: int, what: str) -> None:
    """Log how many members are left out.

    Args:
        path: The archives.
        num_others: Members that are not files.
        num_left_out: Files that are not samples.
        what: Samples, in words.
    """
    if num_others:
        others = format_count(num_others, "member that is not a file", "members that are not files")
        logger.warning("%s: left out %s: links, devices and the like", path, others)
    if num_left_out:
        logger.warning("%s: left out %s in archives, not %s", path, format_count(num_left_out, "file"), what)
