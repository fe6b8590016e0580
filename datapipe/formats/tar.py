"""Tar shards as WebDataset reads them: `key.jpg` and `key.cls` (the label in ASCII) side by side.

Members have ustar headers (POSIX.1-1988, "ustar Interchange Format"). Beside each shard lies DALI's index (`.idx`,
version 1.2: per sample the extension, offset, size and name of each of its files).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished
from .naming import EXTENSIONS

SUFFIX = ".tar"
_BLOCK_BYTES = tarfile.BLOCKSIZE
# Two headers, the label's block, and half a block of padding behind the image.
OVERHEAD_BYTES = 3 * _BLOCK_BYTES + _BLOCK_BYTES // 2
_MAX_NAME_BYTES = tarfile.LENGTH_NAME
_MAX_IMAGE_BYTES = 8**11 - 1  # eleven octal digits

# A header in which name, size and checksum are to be set. It has no time and no owner, so that the same input gives the
# same bytes. It is a template because TarInfo.tobuf would take most of a sample's time.
_TEMPLATE = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
_MODE_AND_OWNER, _TIME, _REST = _TEMPLATE[100:124], _TEMPLATE[136:148], _TEMPLATE[156:]
_CONSTANT_SUM = sum(_MODE_AND_OWNER) + sum(_TIME) + sum(_REST) + 8 * ord(" ")  # the checksum counts as spaces


def member_header(name: bytes, size: int) -> bytes:
    """Build the ustar header of a regular file. Raises ValueError when it has no room for the name or the size."""
    if len(name) > _MAX_NAME_BYTES:
        raise ValueError(f"the name {name.decode()!r} has {len(name)} bytes, a tar shard holds {_MAX_NAME_BYTES}")
    if size > _MAX_IMAGE_BYTES:
        raise ValueError(f"{name.decode()!r} has {size} bytes, a tar shard holds files up to {_MAX_IMAGE_BYTES}")
    digits = b"%011o\0" % size
    checksum = _CONSTANT_SUM + sum(name) + sum(digits)
    return b"%b%b%b%b%06o\0 %b" % (name.ljust(_MAX_NAME_BYTES, b"\0"), _MODE_AND_OWNER, digits, _TIME, checksum, _REST)


class Writer:
    """Lays out a tar shard."""

    head = b""

    def __init__(self) -> None:
        self._position = 0
        self._offsets: list[int] = []
        self._index: list[str] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        extension = EXTENSIONS[header.encoding]
        image_name, label_name = f"{key}.{extension}", f"{key}.cls"
        size, text = len(data), b"%d" % label
        image_header = member_header(image_name.encode(), size)
        label_header = member_header(label_name.encode(), len(text))

        padding = bytes(-size % _BLOCK_BYTES)
        image_at = self._position + _BLOCK_BYTES
        label_at = image_at + size + len(padding) + _BLOCK_BYTES
        self._position = label_at + _BLOCK_BYTES
        self._offsets.append(image_at)
        self._index.append(f"{extension} {image_at} {size} {image_name} cls {label_at} {len(text)} {label_name}\n")
        return image_header, data, b"%b%b%b" % (padding, label_header, text.ljust(_BLOCK_BYTES, b"\0"))

    def finish(self) -> Finished:
        index = f"v1.2 {len(self._index)}\n" + "".join(self._index)
        return Finished(bytes(2 * _BLOCK_BYTES), {}, self._offsets, {".idx": index.encode()})


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through tarfile."""
    with tarfile.open(path, "r:") as archive:
        image = b""
        for member in archive:
            file = archive.extractfile(member)
            data = file.read() if file else b""
            key, _, extension = member.name.partition(".")
            if extension == "cls":
                yield key, image, int(data)
            image = data
