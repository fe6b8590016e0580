"""LMDB shards: one environment in one file each, with the entries `key.jpg` and `key.cls` (the label in ASCII).

LMDB keeps every value in one piece in its file, so that its place in the read-only map is its offset
in the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..fsio import free_bytes
from . import Finished

SUFFIX = ".lmdb"
# Values beyond half a page begin a page of their own: half a page is lost behind each, on average.
PAGE_BYTES = 4096
OVERHEAD_BYTES = PAGE_BYTES // 2 + 128


class Writer:
    """Holds the shard in memory until `finish`: an environment's map size must be known at its creation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: list[tuple[bytes, bytes]] = []

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        self._entries.append((f"{key}.{extension}".encode(), data))
        self._entries.append((f"{key}.cls".encode(), str(label).encode()))

    def finish(self) -> Finished:
        import lmdb

        total = sum(len(name) + len(value) for name, value in self._entries)
        # Twice the bytes and two pages an entry: page splits leave leaves half empty. The file has only
        # what is used of it.
        map_size = 2 * total + 2 * PAGE_BYTES * len(self._entries) + (1 << 20)
        options = {"subdir": False, "lock": False, "map_size": -(-map_size // PAGE_BYTES) * PAGE_BYTES}
        try:
            with lmdb.open(os.fsencode(self._path), sync=False, readahead=False, **options) as env:
                with env.begin(write=True) as transaction:
                    for name, value in self._entries:
                        transaction.put(name, value)
                env.sync(True)
        except lmdb.Error as error:
            # LMDB calls a write that ended early an I/O error, whatever it was that ended it.
            number = errno.ENOSPC if free_bytes(self._path.parent) < total else errno.EIO
            raise OSError(number, os.strerror(number), str(self._path)) from error
        return Finished(self._file_offsets(options), {})

    def _file_offsets(self, options: dict) -> list[int]:
        import lmdb

        with (
            lmdb.open(os.fsencode(self._path), readonly=True, **options) as env,
            env.begin(buffers=True) as transaction,
        ):
            base = _map_address(self._path)
            images = self._entries[::2]
            places = (np.frombuffer(transaction.get(name), np.uint8).ctypes.data for name, _ in images)
            offsets = [place - base for place in places]
        with open(self._path, "rb") as file:  # the offsets rest on how LMDB maps its file: look
            for i in (0, -1):
                file.seek(offsets[i])
                assert file.read(len(images[i][1])) == images[i][1], "LMDB does not map its file from the beginning"
        return offsets

    def close(self) -> None:
        self._entries.clear()


def _map_address(path: Path) -> int:
    """Where this process has mapped the file (proc(5), /proc/pid/maps)."""
    name = os.fsencode(f"/{path.name}")  # the folder's name may be escaped there
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        addresses, _, offset, *_ = line.split()
        if line.endswith(name) and int(offset, 16) == 0:
            return int(addresses.split(b"-")[0], 16)
    raise OSError(f"{path} is not among the maps of this process")


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    import lmdb

    with lmdb.open(os.fsencode(path), subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        for name, value in transaction.cursor():
            key, extension = name.decode().rsplit(".", 1)
            if extension != "cls":
                yield key, value, int(transaction.get(f"{key}.cls".encode()))
