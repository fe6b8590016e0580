"""Zip shards: `key.jpg` and `key.cls` (the label in ASCII) side by side, stored without compression.

After PKWARE's APPNOTE.TXT 6.3: local headers 4.3.7, central directory 4.3.12, its end 4.3.14 to 4.3.16. ZIP64 only
where a number needs it: more than 65,534 members, or places beyond 4 GiB.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished
from .naming import EXTENSIONS

SUFFIX = ".zip"
# Two local headers, two central ones, two names of about 40 bytes in each, and the label.
OVERHEAD_BYTES = 2 * (30 + 46 + 2 * 40) + 3
# A field of all ones means: see the ZIP64 record.
MAX_16, MAX_32 = 0xFFFF, 0xFFFFFFFF

LOCAL = struct.Struct("<4s 5H 3I 2H")
CENTRAL = struct.Struct("<4s 6H 3I 5H 2I")
OFFSET_EXTRA = struct.Struct("<2H Q")  # 4.5.3
_END = struct.Struct("<4s 4H 2I H")
END_64 = struct.Struct("<4s Q 2H 2I 4Q")
LOCATOR_64 = struct.Struct("<4s I Q I")

VERSION, VERSION_64 = 20, 45  # of the specification, times ten, that a reader needs
FLAGS, STORED = 1 << 11, 0  # names in UTF-8
TIME, DATE = 0, 1 << 5 | 1  # 1980-01-01: the same input gives the same bytes
MADE_BY = 3 << 8 | VERSION_64  # Unix, whose file mode follows in the external attributes
ATTRIBUTES = 0o100644 << 16


class Writer:
    """Lays out a zip shard."""

    head = b""

    def __init__(self) -> None:
        self._position = 0
        self._offsets: list[int] = []
        self._directory: list[bytes] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        if len(data) >= MAX_32:
            raise ValueError(f"{key}: {len(data)} bytes, a zip shard holds images below {MAX_32}")
        text = b"%d" % label
        image_header = self._member(f"{key}.{EXTENSIONS[header.encoding]}".encode(), data)
        self._offsets.append(self._position - len(data))
        return image_header, data, self._member(f"{key}.cls".encode(), text) + text

    def _member(self, name: bytes, data: Buffer) -> bytes:
        """Build a file's local header, enter the file into the directory, and move the position behind its data."""
        size, position = len(data), self._position
        same = FLAGS, STORED, TIME, DATE, zlib.crc32(data), size, size, len(name)
        extra, version = b"", VERSION
        if position >= MAX_32:
            extra, version = OFFSET_EXTRA.pack(1, 8, position), VERSION_64
        place = len(extra), 0, 0, 0, ATTRIBUTES, min(position, MAX_32)
        self._directory.append(CENTRAL.pack(b"PK\1\2", MADE_BY, version, *same, *place) + name + extra)
        self._position = position + LOCAL.size + len(name) + size
        return LOCAL.pack(b"PK\3\4", VERSION, *same, 0) + name

    def finish(self) -> Finished:
        directory, count, begin = b"".join(self._directory), len(self._directory), self._position
        end = b""
        if count >= MAX_16 or len(directory) >= MAX_32 or begin >= MAX_32:
            rest = END_64.size - 12  # what follows the length itself
            end = END_64.pack(
                b"PK\6\6", rest, MADE_BY, VERSION_64, 0, 0, count, count, len(directory), begin
            ) + LOCATOR_64.pack(b"PK\6\7", 0, begin + len(directory), 1)
        count, size = min(count, MAX_16), min(len(directory), MAX_32)
        end += _END.pack(b"PK\5\6", 0, 0, count, count, size, min(begin, MAX_32), 0)
        return Finished(directory + end, {}, self._offsets, {})


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through zipfile."""
    with zipfile.ZipFile(path) as archive:
        image = b""
        for name in archive.namelist():
            data = archive.read(name)
            key, _, extension = name.partition(".")
            if extension == "cls":
                yield key, image, int(data)
            image = data
