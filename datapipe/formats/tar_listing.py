"""List where the files in a tar archive lie, from its headers alone: one small read for each.

A plain header (POSIX ustar, GNU, old V7; pax headers that give only times and owners) is read here. An archive with
anything else (long names, sparse files) is left to Python's tarfile, which knows it all and is slower. Archives that
were appended to another, behind its end mark, are listed too, and a link stands for the member that it leads to. The
format: POSIX.1-2001 pax, https://www.gnu.org/software/tar/manual/html_node/Standard.html.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ..errors import SourceError
from .magic import HEAD_BYTES, explain

BLOCK = tarfile.BLOCKSIZE
END = bytes(BLOCK)
# Read at a time: a page costs what a header costs, and holds the next headers where files are small (labels).
WINDOW = 4096
TAIL = 64 << 10  # read at a time behind an end mark
_MAX_LINKS = 40  # from one to the next, as the kernel allows
FILE, FOLDER, PAX = (b"0", b"\0", b"7"), b"5", b"x"
HARD_LINK, SYMBOLIC_LINK = b"1", b"2"
WITHOUT_BYTES = {b"3": "device", b"4": "device", b"6": "pipe"}
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

    members: list[Member]  # regular files, and links to them
    others: list[tuple[str, str]]  # what each other member is, and its name: links that lead nowhere, devices, …


class _Unusual(Exception):
    """The archive has to be left to tarfile."""


def list_members(
    fd: int,
    path: str,
    begin: int = 0,
    end: int | None = None,
    keep_content: Callable[[str], bool] = lambda name: False,
) -> TarListing:
    """List an archive that is, or lies in, a file.

    Names are as they stand there: they may hold `..`, so they must not be opened as paths.

    Args:
        fd: The file's descriptor.
        path: The file, for messages.
        begin: Position in the file at which the archive begins, in bytes.
        end: Position at which it ends; None: the end of the file.
        keep_content: Function that says, by a member's name, whether its content is returned, if it is small.

    Returns:
        The members, in their order, and what else there is.

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
        if end is None and (what := explain(os.pread(fd, HEAD_BYTES, begin), path)):
            raise SourceError(what, path=path) from error
        raise SourceError(f"is a corrupt or truncated tar archive, or none: {error}", path=path) from error


class _Window(io.RawIOBase):
    """A range of a file: read at any place, or as a file of its own (for tarfile)."""

    def __init__(self, fd: int, begin: int, end: int) -> None:
        self.fd, self.begin, self.end = fd, begin, end
        self._data, self._start = b"", begin
        self.start_at(begin)

    def start_at(self, place: int) -> None:
        """Have the file of its own begin at a place of the real one."""
        self._first, self._position = place, 0

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
        data = self.at(self._first + self._position, size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position


class _Archive:
    """The members that were found so far. Links are resolved at the end, as they may lead to what follows them."""

    def __init__(self, window: _Window, keep_content: Callable[[str], bool]) -> None:
        self.others: list[tuple[str, str]] = []
        self._members: list[Member | tuple[str, str]] = []  # or a link's name, and what it leads to
        self._window, self._keep = window, keep_content

    def add(self, name: str, offset: int, size: int) -> None:
        """Add a regular file."""
        self._members.append(self._make_member(name, offset, size))

    def add_link(self, name: str, target: str, is_symbolic: bool) -> None:
        """Add a link; a symbolic one is relative to its folder, a hard one to the archive."""
        target = posixpath.join(posixpath.dirname(name), target) if is_symbolic else target
        self._members.append((name, posixpath.normpath(target)))

    def listing(self) -> TarListing:
        """Return what was found, with each link that leads to a file as a member of its own."""
        files = {posixpath.normpath(item.name): item for item in self._members if isinstance(item, Member)}
        links = {posixpath.normpath(item[0]): item[1] for item in self._members if not isinstance(item, Member)}
        members: list[Member] = []
        for item in self._members:
            if isinstance(item, Member):
                members.append(item)
                continue
            name, target = item
            for _ in range(_MAX_LINKS):
                if target in files or target not in links:
                    break
                target = links[target]
            if target in files:
                members.append(self._make_member(name, files[target].offset, files[target].size))
            else:
                self.others.append(("link that leads to no file of the archive", name))
        return TarListing(members, self.others)

    def _make_member(self, name: str, offset: int, size: int) -> Member:
        is_kept = size <= MAX_CONTENT_BYTES and self._keep(name)
        return Member(name, offset, size, self._window.at(offset, size) if is_kept else None)


def _list_plain(window: _Window, keep_content: Callable[[str], bool]) -> TarListing:
    archive = _Archive(window, keep_content)
    position: int | None = window.begin
    while position is not None:
        while (header := window.at(position, BLOCK)) != END:
            name, kind, size = _parse(header, position)
            position += BLOCK
            if kind in (HARD_LINK, SYMBOLIC_LINK):
                archive.add_link(name, _text(header[157:257]), kind == SYMBOLIC_LINK)
                continue
            if kind in WITHOUT_BYTES:
                archive.others.append((WITHOUT_BYTES[kind], name))
                continue
            if position + size > window.end:
                raise tarfile.ReadError(f"it ends within {name}")
            if kind == PAX:
                if size > WINDOW or not HARMLESS.fullmatch(window.at(position, size)):
                    raise _Unusual
            elif kind in FILE and not name.endswith("/"):
                archive.add(name, position, size)
            elif kind not in (*FILE, FOLDER):
                raise _Unusual
            position += -(-size // BLOCK) * BLOCK
        position = _behind_end(window, position)
    return archive.listing()


def _behind_end(window: _Window, position: int) -> int | None:
    """Find what follows an end mark: an archive that was appended, in whole blocks. None: zeros, to the end.

    Writers fill up to ten KiB with zeros. Raises TarError if something follows that is not an archive.
    """
    while position < window.end:
        data = window.at(position, min(TAIL, window.end - position))
        if rest := data.lstrip(b"\0"):
            position += (len(data) - len(rest)) // BLOCK * BLOCK
            try:
                _parse(window.at(position, BLOCK), position)
            except tarfile.ReadError as error:
                raise tarfile.ReadError(f"what follows its end mark is not an archive: {error}") from error
            return position
        position += len(data)
    return None


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
    return _text(name), header[156:157], size


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _list_slowly(window: _Window, keep_content: Callable[[str], bool]) -> TarListing:
    archive = _Archive(window, keep_content)
    begin: int | None = window.begin
    while begin is not None:
        window.start_at(begin)
        with tarfile.open(fileobj=window, mode="r:") as file:
            for info in file:
                if info.size < 0:  # the next header would be an earlier one: an endless loop
                    raise tarfile.ReadError(f"it gives {info.name} a size of {info.size} bytes")
                if info.islnk() or info.issym():
                    archive.add_link(info.name, info.linkname, info.issym())
                elif info.isreg() and not info.issparse():
                    offset = begin + info.offset_data
                    if not 0 <= info.size <= window.end - offset:
                        raise tarfile.ReadError(f"it ends within {info.name}")
                    archive.add(info.name, offset, info.size)
                elif not info.isdir():
                    what = "sparse file" if info.issparse() else WITHOUT_BYTES.get(info.type, "member of unknown type")
                    archive.others.append((what, info.name))
            # tarfile takes a header that it cannot read for the end.
            end = begin + file.offset
            if window.at(end, BLOCK) != END:
                raise tarfile.ReadError(f"it ends without an end mark, after {end} bytes")
        begin = _behind_end(window, end)
    return archive.listing()
