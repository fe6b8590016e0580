"""Tar shards as WebDataset wants them: `key.jpg` and `key.cls` (the label in ASCII) side by side.

Beside each shard lies DALI's index (`.idx`, version 1.2: per sample the extension, offset, size and
name of each of its files).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from . import Finished

SUFFIX = ".tar"
# Two headers, the label's block, and half a block of padding behind the image.
OVERHEAD_BYTES = 3 * tarfile.BLOCKSIZE + tarfile.BLOCKSIZE // 2


class Writer:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by close)
        self._position = 0
        self._offsets: list[int] = []
        self._index: list[str] = []

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        text = str(label).encode()
        image_name, label_name = f"{key}.{extension}", f"{key}.cls"
        image_at = self._member(image_name, data)
        label_at = self._member(label_name, text)
        self._offsets.append(image_at)
        self._index.append(f"{extension} {image_at} {len(data)} {image_name} cls {label_at} {len(text)} {label_name}\n")

    def _member(self, name: str, data: bytes) -> int:
        """Write one file; return where its bytes begin."""
        info = tarfile.TarInfo(name)  # no time, no owner: the same input gives the same bytes
        info.size = len(data)
        header = info.tobuf(tarfile.USTAR_FORMAT)
        padding = -len(data) % tarfile.BLOCKSIZE
        self._file.write(header)
        self._file.write(data)
        self._file.write(bytes(padding))
        begin = self._position + len(header)
        self._position = begin + len(data) + padding
        return begin

    def finish(self) -> Finished:
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))
        self._file.close()
        index = f"v1.2 {len(self._index)}\n" + "".join(self._index)
        return Finished(self._offsets, {".idx": index.encode()})

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    with tarfile.open(path, "r:") as archive:
        image = b""
        for member in archive:
            data = archive.extractfile(member).read()
            key, extension = member.name.rsplit(".", 1)
            if extension == "cls":
                yield key, image, int(data)
            image = data
